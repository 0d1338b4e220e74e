"""What transforms of `torch.func` made of a tensor: whether one of them follows it."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch._C import _functorch
from torch._functorch import pyfunctorch
from torch.autograd import forward_ad


def unfollowed(x: torch.Tensor) -> torch.Tensor | None:
    """The tensor itself where no transform follows it, else None.

    A transform that differentiates wraps whatever is made inside of it (`torch.arange(3)`), followed or not.
    Each wrapper is asked at its own level: from one further in, a tangent does not show.
    """
    with ExitStack() as outer:
        while _functorch.is_functorch_wrapped_tensor(x):
            level = _functorch.maybe_get_level(x)
            while _functorch.peek_interpreter_stack().level() > level:
                outer.enter_context(pyfunctorch.temporarily_pop_interpreter_stack())
            if not _functorch.is_gradtrackingtensor(x) or x.requires_grad:
                return None
            if forward_ad.unpack_dual(x).tangent is not None:
                return None
            x = _functorch.get_unwrapped(x)
    return x

"""Making a DTensor inside a transform of `torch.func`: a constant of it, made as if it were not there."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from shardwright.compat import outside_transforms, transforms_on, tree_map_only, unfollowed
from shardwright.errors import LayoutError

_P = ParamSpec("_P")
_R = TypeVar("_R")


def of_constants(verb: Callable[_P, _R]) -> Callable[_P, _R]:
    """`verb` of the tensors inside what transforms made of them: collectives and kernels need their memory.

    Else a rank that sends would fail where its peers wait for it.
    Raises: LayoutError: a transform follows one of the tensors; before anything is sent.
    """

    @wraps(verb)
    def outside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not transforms_on():
            return verb(*args, **kwargs)
        args, kwargs = tree_map_only(torch.Tensor, _constant, (args, kwargs))
        with outside_transforms():
            return verb(*args, **kwargs)

    return outside


def _constant(x: torch.Tensor) -> torch.Tensor:
    constant = unfollowed(x)
    if constant is None:
        raise LayoutError(
            f"a torch.func transform follows this tensor of shape {tuple(x.shape)}: what the transform made "
            "of it cannot be placed. fix: sw.distribute_tensor it before the transform"
        )
    return constant

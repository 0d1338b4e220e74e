"""ATen calls with their data, captured while operators of torch's own test database run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwright.testing.simulate import Sample

Captured = tuple[torch._ops.OpOverload, Sample]


class Capture(TorchDispatchMode):
    """Keeps every distinct ATen call (by op, shapes and other arguments) that runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[tuple[Any, ...], Captured] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        key = (func, repr(tree_map_only(Tensor, _key, (args, kwargs))))
        if key not in self.calls and any(isinstance(x, Tensor) for x in tree_leaves((args, kwargs))):
            kept = tree_map_only(Tensor, lambda x: x.detach().clone(), (args, kwargs))
            self.calls[key] = (func, Sample(*kept))
        return func(*args, **kwargs)


def _key(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), str(x.dtype)


def captured_calls(
    op_infos: Any,
    *,
    samples: int,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.int64),
    backward: bool = True,
) -> dict[torch._ops.OpOverload, list[Sample]]:
    """Calls by overload, from the first `samples` inputs of each OpInfo and dtype, and their backward."""
    found: dict[torch._ops.OpOverload, list[Sample]] = {}
    for info in op_infos:
        with Capture() as capture:
            for dtype in dtypes:
                for sample in _inputs(info, dtype, samples):
                    _run(info, sample, backward=backward and dtype.is_floating_point)
        for op, sample in capture.calls.values():
            found.setdefault(op, []).append(sample)
    return found


def _inputs(info: Any, dtype: torch.dtype, count: int) -> Iterator[Any]:
    if dtype not in info.supported_dtypes("cpu") or info.name.startswith("jiterator"):
        return
    grad = dtype.is_floating_point and info.supports_autograd
    torch.manual_seed(0)
    yield from islice(info.sample_inputs("cpu", dtype, requires_grad=grad), count)


def _run(info: Any, sample: Any, *, backward: bool) -> None:
    try:
        out = info.op(sample.input, *sample.args, **sample.kwargs)
        if backward:
            outs = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]
            total = sum((x * torch.randn_like(x)).sum() for x in outs if x.is_floating_point())
            if isinstance(total, Tensor):
                total.backward()
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return  # the single-device op refuses this input; nothing to learn from it

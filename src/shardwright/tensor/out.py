"""`out=` of the functions that torch composes of others: compute, then write into what was given.

Such a function writes into views and temporary tensors of its own on the way, and changes their sizes, all of
it behind a wrapper's back. What it means is plain: the value, in the tensors that were given. A function with
one kernel of its own is not taken apart: its kernel writes into the local tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch


@lru_cache(maxsize=4096)
def fills_itself(func: Callable[..., Any]) -> bool:
    """Does the function have a kernel that writes into `out`, rather than being composed of others?"""
    packet = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return True
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    for name in packet.overloads():
        overload = getattr(packet, name)
        if any(a.is_out for a in overload._schema.arguments) and overload.has_kernel_for_dispatch_key(
            composite
        ):
            return False
    return True


def call_with_out(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func(*args, out=...)` by its meaning.

    Raises: RuntimeError: as torch does, an operand that requires a gradient, a dtype that cannot be cast.
    Cost: what the function costs, and bringing its result to the layout of `out`.
    """
    rest = {name: value for name, value in kwargs.items() if name != "out"}
    out = kwargs["out"]
    targets = [out] if isinstance(out, torch.Tensor) else list(out)
    if torch.is_grad_enabled() and any(_requires_grad(v) for v in (*args, *rest.values(), *targets)):
        raise RuntimeError(
            f"{func.__name__}(): functions with out=... arguments don't support automatic differentiation, "
            "but one of the arguments requires grad."
        )
    result = func(*args, **rest)
    results = [result] if isinstance(result, torch.Tensor) else list(result)
    for target, value in zip(targets, results, strict=True):
        _write(target, value)
    return out if isinstance(result, torch.Tensor) else type(result)(targets)


def _requires_grad(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_requires_grad(v) for v in value)
    return isinstance(value, torch.Tensor) and value.requires_grad


def _write(target: torch.Tensor, value: torch.Tensor) -> None:
    if not torch.can_cast(value.dtype, target.dtype):
        raise RuntimeError(
            f"result type {value.dtype} can't be cast to the desired output type {target.dtype}"
        )
    if target.shape != value.shape:
        target.resize_(value.shape)
    target.copy_(value)

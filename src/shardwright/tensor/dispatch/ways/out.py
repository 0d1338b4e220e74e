"""`out=` and in-place forms by their meaning: compute, then write into what was given.

A function that torch composes of others writes into views and temporary tensors of its own on the way, and
changes their sizes, all of it behind a wrapper's back. What it means is plain: the value, in the tensors that
were given. The same serves ops that have a rule, or steps, only in the form that writes nothing. What has a
rule for its kernel is not taken apart: the kernel writes into the local tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwright.compat import is_composite, tree_leaves
from shardwright.remember import remembered
from shardwright.rules.call import Args
from shardwright.rules.op import is_pointwise, out_names

# Composed of other functions, whose result torch copies into `out`: the copy passes its gradient on. Found by
# giving `out=` to every operator of torch's database beside operands that require a gradient.
_DIFFERENTIATES = frozenset({
    "_chunk_cat", "alias_copy", "as_strided_copy", "conj_physical", "diag", "diagonal_copy",
    "expand_copy", "floor_divide", "heaviside", "linalg_cond", "linalg_ldl_solve",
    "linalg_matrix_norm", "linalg_norm", "linalg_tensorinv", "linalg_tensorsolve", "log_softmax",
    "nanquantile", "permute_copy", "quantile", "slice_scatter", "softmax", "special_ndtr",
    "squeeze_copy", "t_copy", "tensordot", "transpose_copy", "unfold_copy", "unsqueeze_copy", "view_copy",
})  # fmt: skip

# Composed of one op that goes element by element.
_OTHER_NAMES = frozenset({
    "arctan2", "clip", "divide", "float_power", "greater", "greater_equal", "less", "less_equal", "multiply",
    "not_equal", "subtract", "true_divide",
})  # fmt: skip


@remembered(4096)
def fills_itself(func: Callable[..., Any]) -> bool:
    """Does the function have a kernel that writes into `out`, rather than being composed of others?"""
    packet = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return True
    for name in packet.overloads():
        overload = getattr(packet, name)
        if any(a.is_out for a in overload._schema.arguments) and is_composite(overload):
            return False
    return True


def call_with_out(func: Callable[..., Any], args: Args, kwargs: dict[str, Any]) -> Any:
    """`func(*args, out=...)` by its meaning.

    Raises: RuntimeError: as torch does, an operand that requires a gradient, a dtype that cannot be cast,
        an operand that would be resized by what goes element by element.
    Cost: what the function costs, and bringing its result to the layout of `out`.
    """
    rest = {name: value for name, value in kwargs.items() if name != "out"}
    out = kwargs["out"]
    targets = [out] if isinstance(out, torch.Tensor) else list(out)
    differentiates = getattr(func, "__name__", "") in _DIFFERENTIATES or not torch.is_grad_enabled()
    if not differentiates and any(_requires_grad(v) for v in (*args, *rest.values(), *targets)):
        raise RuntimeError(
            f"{func.__name__}(): functions with out=... arguments don't support automatic differentiation, "
            "but one of the arguments requires grad."
        )
    result = func(*args, **rest)
    results = [result] if isinstance(result, torch.Tensor) else list(result)
    if func.__name__ in _OTHER_NAMES:
        _refuse_operands(func.__name__, [args, *rest.values()], [(out, tuple(result.shape))])
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
        with torch.no_grad():
            target.resize_(value.shape)
    target.copy_(value)


def fits(func: torch._ops.OpOverload, made: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """That what the op makes goes into a tensor of this shape and dtype in place.

    Raises: RuntimeError: as the kernels do, of an op that writes element by element.
    """
    if tuple(made.shape) != tuple(shape):
        raise RuntimeError(_other_shape(func.name(), shape, made.shape))
    if not torch.can_cast(made.dtype, dtype):
        raise RuntimeError(
            f"{func.name()}: result type {made.dtype} can't be cast to {dtype}, which it is written into"
        )


def resized_first(func: torch._ops.OpOverload, sizes: Sequence[tuple[int, ...]]) -> Callable[..., Any]:
    """`func` on `out` tensors that get the sizes of the results before it runs, as on one device.

    Calling it raises: RuntimeError: `out` is an operand too of an op that goes element by element. (Others
    read on one device what the resized operand happens to hold.)
    """
    names = out_names(func)
    keeps_operands = is_pointwise(func)

    def call(*args: Any, **kwargs: Any) -> Any:
        targets = list(zip(tree_leaves([kwargs[name] for name in names]), sizes, strict=True))
        if keeps_operands:
            operands = [args, *(value for name, value in kwargs.items() if name not in names)]
            _refuse_operands(func.name(), operands, targets)
        for target, size in targets:
            if tuple(target.shape) != size:
                target.resize_(size)
        return func(*args, **kwargs)

    return call


def _refuse_operands(
    name: str, operands: Sequence[Any], targets: Sequence[tuple[torch.Tensor, tuple[int, ...]]]
) -> None:
    """Raises: RuntimeError: a target that is an operand too has another size than what it is to get."""
    for target, size in targets:
        if tuple(target.shape) != size and any(target is x for x in tree_leaves(operands)):
            raise RuntimeError(_other_shape(name, target.shape, size))


def _other_shape(name: str, into: Sequence[int], of: Sequence[int]) -> str:
    return f"{name}: output with shape {list(into)} doesn't match the broadcast shape {list(of)}"


def written_from(func: torch._ops.OpOverload, functional: torch._ops.OpOverload) -> Callable[..., Any]:
    """`func` as its functional form and a copy into what it writes."""
    outs = out_names(func)
    asked = {a.name for a in functional._schema.arguments} - {a.name for a in func._schema.arguments}

    def call(*args: Any, **kwargs: Any) -> Any:
        given = [kwargs.pop(name) for name in outs]
        targets = tree_leaves(given) if outs else [args[0]]
        kwargs |= {name: getattr(targets[0], name) for name in asked & {"dtype", "device"}}
        for target, value in zip(targets, tree_leaves(functional(*args, **kwargs)), strict=True):
            if not outs:
                fits(func, value, target.shape, target.dtype)
            _write(target, value)
        returned = given if outs else targets
        return None if not func._schema.returns else returned[0] if len(returned) == 1 else tuple(returned)

    return call

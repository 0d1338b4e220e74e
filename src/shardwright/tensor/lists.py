"""`_foreach_*` and `_fused_*`: one call on the lists of local tensors where the tensors of a position agree.

Otherwise element by element through the scalar op, each with its own rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwright.errors import RuleError
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.move import move_local
from shardwright.tensor.spec import spec_of, with_dtype
from shardwright.tensor.wrap import as_replicated, wrap

aten = torch.ops.aten
# Reductions of each element: their results are no partitions of the operand.
_REDUCING = ("norm", "max", "powsum")
# Linear in a pending list as long as all operands are pending; anything else finishes the values first.
_LINEAR = frozenset({"aten::_foreach_neg", "aten::_foreach_neg_"})


def takes_lists(func: torch._ops.OpOverload) -> bool:
    """Is it one of these ops? Not every fused op is: `_fused_rms_norm` takes one tensor, and has a rule."""
    schema = func._schema
    named = schema.name.startswith(("aten::_foreach_", "aten::_fused_"))
    return named and isinstance(schema.arguments[0].type, torch._C.ListType)


def run_on_lists(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A list op on DTensors.

    Raises: RuleError: a list element whose tensors cannot be brought to one layout.
    """
    name = func._schema.name
    if name.split("::_foreach_")[-1].rstrip("_") in _REDUCING:
        return _element_by_element(func, args, kwargs)
    columns = _columns(args, kwargs)
    finish = name not in _LINEAR and any(_pending(t) for column in columns for t in column)
    if finish or not all(_agree(column) for column in columns):
        if name.startswith("aten::_fused_"):
            return _call(func, *_aligned(args, kwargs))
        return _element_by_element(func, args, kwargs)
    return _call(func, args, kwargs)


def _lists(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[list[Any]]:
    found = [v for v in (*args, *kwargs.values()) if isinstance(v, list | tuple) and _has_tensor(v)]
    return [list(v) for v in found]


def _has_tensor(values: Any) -> bool:
    return any(isinstance(v, torch.Tensor) for v in values)


def _columns(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[list[DTensor]]:
    """Per position the DTensors of more than one element that stand there in any list."""
    lists = _lists(args, kwargs)
    length = max((len(v) for v in lists), default=0)
    return [[v[i] for v in lists if i < len(v) and isinstance(v[i], DTensor)] for i in range(length)]


def _pending(x: DTensor) -> bool:
    return any(p.is_pending for p in x._spec.layout.placements)


def _agree(column: list[DTensor]) -> bool:
    """Same cut everywhere: equal placements and order on equal meshes and shapes (dtypes may differ)."""
    first = column[0]._spec.layout if column else None
    return first is None or all(_same_cut(first, t._spec.layout) for t in column[1:])


def _same_cut(left: Any, right: Any) -> bool:
    if left is right:
        return True
    return bool(
        left.placements == right.placements
        and left.order == right.order
        and left.shape == right.shape
        and left.mesh_shape == right.mesh_shape
    )


def _call(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The list op on local tensors; results take the layouts of the first list."""
    firsts = next(iter(_lists(args, kwargs)), [])
    out = func(*(_local(a) for a in args), **{name: _local(value) for name, value in kwargs.items()})
    if out is None or not isinstance(out, list | tuple):
        return out
    return [_wrapped(local, like) for local, like in zip(out, firsts, strict=True)]


def _wrapped(local: torch.Tensor, like: Any) -> Any:
    if not isinstance(like, DTensor):
        return local
    layout = with_dtype(like._spec.layout, local.dtype)
    return wrap(local, spec_of(layout, like.device_mesh, like._spec.use))


def _local(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value._local_tensor
    if isinstance(value, list | tuple):
        return [_local(v) for v in value]
    return value


def _aligned(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Fused optimizers: every tensor of a position takes the layout of the first list's, the parameter's."""
    parameters = args[0]

    def align(values: Any) -> Any:
        if not isinstance(values, list | tuple) or not _has_tensor(values):
            return values
        return [_as_parameter(v, p) for v, p in zip(values, parameters, strict=True)]

    first, *rest = args
    return (first, *(align(v) for v in rest)), {name: align(value) for name, value in kwargs.items()}


def _as_parameter(value: Any, parameter: Any) -> Any:
    if not isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return value
    if _same_cut(value._spec.layout, parameter._spec.layout):
        return value
    if value._spec.layout.mesh_shape != parameter._spec.layout.mesh_shape:
        raise RuleError(
            f"fused optimizer: {value._spec.layout} beside its parameter "
            f"{parameter._spec.layout} on another mesh"
        )
    order = parameter._spec.layout.order_names
    target = value._spec.layout.with_placements(parameter._spec.layout.placements, order=order)
    return wrap(move_local(value, target, reason="fused optimizer"), spec_of(target, value.device_mesh))


def _element_by_element(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The scalar op per position, each with its own rule."""
    scalar = _scalar_op(func)
    length = max((len(v) for v in _lists(args, kwargs)), default=0)
    out = []
    for i in range(length):
        element_args = [_element(a, i, length) for a in args]
        element_kwargs = {name: _element(value, i, length) for name, value in kwargs.items()}
        mesh = next((a.device_mesh for a in element_args if isinstance(a, DTensor)), None)
        if mesh is not None:
            element_args = [
                as_replicated(a, mesh) if isinstance(a, torch.Tensor) and not isinstance(a, DTensor) else a
                for a in element_args
            ]
        out.append(scalar(*_positional(scalar, element_args, element_kwargs), **element_kwargs))
    return out if func._schema.returns else None


def _positional(scalar: Any, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The list ops take `value` by position, the ops of one element by name."""
    if scalar in _NAMED_VALUE and len(args) == 4:
        kwargs["value"] = args[3]
        return args[:3]
    return args


def _element(value: Any, index: int, length: int) -> Any:
    if isinstance(value, list | tuple) and len(value) == length:
        return value[index]
    return value


_NAMED_VALUE = (aten.addcmul, aten.addcmul_, aten.addcdiv, aten.addcdiv_)
_SCALAR_NAMES = {"norm": "linalg_vector_norm", "maximum": "maximum", "minimum": "minimum"}


def _scalar_op(func: torch._ops.OpOverload) -> Any:
    """`aten::_foreach_add_.List` -> `torch.ops.aten.add_`."""
    name = func._schema.name.removeprefix("aten::_foreach_")
    base = name.rstrip("_")
    scalar = _SCALAR_NAMES.get(base, base) + ("_" if name.endswith("_") else "")
    packet = getattr(aten, scalar, None)
    if packet is None:
        raise RuleError(f"{func.name()}: there is no op for one element, and its tensors differ in layout")
    return packet

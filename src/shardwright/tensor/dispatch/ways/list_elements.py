"""A call on lists of tensors as one call per position: of the op for one element, where there is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.compat import overload_for
from shardwright.errors import RuleError
from shardwright.remember import memo
from shardwright.rules.call import Args, Kwargs
from shardwright.rules.op import by_name, list_arguments

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class ElementCall:
    """What a list op does at one position, as a call of its own."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        """Its value; a fused op has none."""
        return self.op(*self.args, **self.kwargs)


def element_calls(func: torch._ops.OpOverload, args: Args, kwargs: Kwargs) -> list[ElementCall]:
    """One call per position of the lists.

    Raises: RuleError: lists of different lengths, or an op that has no counterpart for one element.
    """
    given = by_name(func, args, kwargs)
    length = _length(func, given)
    if func._schema.name.startswith("aten::_fused_"):
        return [_on_lists_of_one(func, given, i) for i in range(length)]
    return [_on_one(func, given, i) for i in range(length)]


def _length(func: torch._ops.OpOverload, given: Mapping[str, Any]) -> int:
    lengths = {name: len(given[name]) for name in list_arguments(func) if given.get(name)}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name} of {n}" for name, n in lengths.items())
        raise RuleError(f"{func.name()}: lists of different lengths: {said}; fix: one tensor for each")
    return next(iter(lengths.values()), 0)


def _on_lists_of_one(func: torch._ops.OpOverload, given: Mapping[str, Any], index: int) -> ElementCall:
    """Fused steps have no op for one parameter: the same op on lists of one."""
    lists = list_arguments(func)
    part = {name: [value[index]] if name in lists and value else value for name, value in given.items()}
    by_name = {a.name for a in func._schema.arguments if a.kwarg_only}
    positional = tuple(value for name, value in part.items() if name not in by_name)
    return ElementCall(func, positional, {name: part[name] for name in part if name in by_name})


def _on_one(func: torch._ops.OpOverload, given: Mapping[str, Any], index: int) -> ElementCall:
    lists = list_arguments(func)
    part = {name: _at(name, value, index, lists) for name, value in given.items()}
    name = func._schema.name.removeprefix("aten::_foreach_")
    if name == "powsum":
        return ElementCall(_power_sum, tuple(part.values()), {})
    named: dict[str, Any] = {key: part.pop(key) for key in _BY_NAME if key in part}
    if name.startswith(("addcmul", "addcdiv")) and len(part) > _ADDCMUL_TENSORS:
        named["value"] = part.popitem()[1]
    op = _op_of_one(func, tuple(part.values()), named)
    return ElementCall(op, tuple(part.values()), named)


_ADDCMUL_TENSORS = 3
_BY_NAME = ("alpha", "dtype", "memory_format", "out")


def _at(name: str, value: Any, index: int, lists: tuple[str, ...]) -> Any:
    if isinstance(value, list | tuple):
        return value[index]
    if name == "scalars" and name not in lists:  # a tensor with a number for each position
        return value[index].item()
    return value


_NAMES = {"norm": "linalg_vector_norm"}
# The ops of two tensors have no in-place form and take no number; a bound does the same.
_BOUNDS = {"maximum": "clamp_min", "minimum": "clamp_max"}
_overloads: dict[tuple[torch._ops.OpOverload, frozenset[str]], torch._ops.OpOverload] = memo(
    "ops of one element", {}
)


def _op_of_one(func: torch._ops.OpOverload, args: Args, kwargs: Kwargs) -> torch._ops.OpOverload:
    """`aten::_foreach_add_.List` -> `aten::add_.Tensor`; the kinds of the arguments go with the overload."""
    key = func, frozenset(kwargs)
    known = _overloads.get(key)
    if known is None:
        known = _overloads[key] = overload_for(_packet(func, args), args, kwargs)
    return known


def _packet(func: torch._ops.OpOverload, args: Args) -> torch._ops.OpOverloadPacket:
    name = func._schema.name.removeprefix("aten::_foreach_")
    base, mark = (name[:-1], "_") if name.endswith("_") else (name, "")
    if mark or (len(args) > 1 and not isinstance(args[1], torch.Tensor)):
        base = _BOUNDS.get(base, base)
    packet = getattr(aten, _NAMES.get(base, base) + mark, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        raise RuleError(f"{func.name()}: there is no op for one element, and its tensors differ in layout")
    return packet


def _power_sum(x: torch.Tensor, order: float = 2, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The sum of the powers of the absolute values; half types are added up in float32."""
    low = x.dtype in {torch.float16, torch.bfloat16}
    powers = torch.pow(torch.abs(x.float() if low else x), order)
    return torch.sum(powers, dtype=dtype) if dtype or not low else torch.sum(powers).to(x.dtype)

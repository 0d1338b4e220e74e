"""Operators and what they are given, and what is asked of both at each call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

FUNCTIONAL = "_c10d_functional"
_LOOKED_AT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
# Of results whose sizes depend on values, although they have no tag that says so.
_OF_VALUES = frozenset(
    f"aten::{name}"
    for name in (
        "_pack_padded_sequence", "_pad_packed_sequence", "_to_sparse", "to_sparse", "_to_sparse_csr",
        "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc", "_coalesce", "_values", "values", "_indices",
        "indices", "crow_indices", "col_indices", "ccol_indices", "row_indices",
    )
)  # fmt: skip
_LEAVES = frozenset(
    {
        torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device, torch.layout,
        torch.memory_format, torch.SymFloat, int, float, bool, str, type(None),
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kind:
    """What a recording asks of an operator, asked once.

    draws: random numbers. looked_at: its result depends on values. of_values: may it raise by them?
        pointwise: not where all that it is given are floats.
    """

    name: str
    namespace: str
    mutable: bool
    draws: bool
    looked_at: bool
    of_values: bool
    pointwise: bool

    @classmethod
    def of(cls, func: Any) -> Self:
        """That of an operator."""
        tags = func.tags
        return cls(
            name=func._schema.name,
            namespace=func.namespace,
            mutable=func._schema.is_mutable,
            draws=torch.Tag.nondeterministic_seeded in tags,
            looked_at=any(tag in tags for tag in _LOOKED_AT) or func._schema.name in _OF_VALUES,
            of_values=not getattr(func, "is_view", False),
            pointwise=torch.Tag.pointwise in tags,
        )

    def may_raise(self, tensors: list[torch.Tensor]) -> bool:
        """May it raise by the values that it is given? Neither a view nor arithmetic on floats does."""
        if not self.of_values:
            return False
        return not (self.pointwise and all(_is_of_floats(x) for x in tensors))

    def takes_places(self, tensors: list[torch.Tensor]) -> bool:
        """May whole numbers that it is given be out of range?"""
        return self.of_values and not all(_is_of_floats(x) for x in tensors)


def _is_of_floats(x: torch.Tensor) -> bool:
    return x.dtype.is_floating_point or x.dtype is torch.bool


def flat(args: Any, kwargs: Mapping[str, Any] | None = None) -> list[Any]:
    """All operands, and the lists that hold some, in no order."""
    found = [*args, *kwargs.values()] if kwargs else [*args]
    for value in found:  # which grows
        if type(value) in _LEAVES:
            continue
        if isinstance(value, list | tuple):
            found += value
        elif isinstance(value, Mapping):
            found += value.values()
    return found


def written_among(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """The operands that an operator writes, by its schema."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return found


def tensors_among(operands: list[Any]) -> list[torch.Tensor]:
    """Those that are tensors."""
    return [x for x in operands if isinstance(x, torch.Tensor)]


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The same lists with a function's results as operands."""
    if type(value) in _LEAVES:
        return function(value)
    if isinstance(value, list):
        return [mapped(function, each) for each in value]
    if isinstance(value, tuple):
        return tuple([mapped(function, each) for each in value])
    if isinstance(value, Mapping):
        return {name: mapped(function, each) for name, each in value.items()}
    return function(value)

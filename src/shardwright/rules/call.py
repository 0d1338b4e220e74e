"""One call of an ATen op, described by the metadata of its logical tensors: what a rule may look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from shardwright.errors import RuleError
from shardwright.remember import remembered

Op = torch._ops.OpOverload
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a rule knows of one logical tensor. Not a tensor: no data, no device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of an op's schema, parsed once."""

    name: str
    default: object
    required: bool
    is_tensor: bool
    is_list: bool
    mutated: bool
    out: bool


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor of a call: the argument that brought it and its place in that argument's list."""

    name: str
    info: TensorInfo
    position: int | None
    mutated: bool
    out: bool


@remembered(4096)
def parameters_of(op: torch._ops.OpOverload) -> tuple[Parameter, ...]:
    """The arguments of `op`'s schema in order, positional ones first."""
    return tuple(_parameter(argument) for argument in op._schema.arguments)


def _parameter(argument: Any) -> Parameter:
    text = str(argument.type)
    alias = argument.alias_info
    return Parameter(
        name=argument.name,
        default=argument.default_value,
        required=not argument.has_default_value(),
        is_tensor="Tensor" in text,
        is_list="List[" in text,
        mutated=alias is not None and alias.is_write,
        out=argument.is_out,
    )


@dataclass(frozen=True)
class Call:
    """One ATen call on logical tensors.

    Args:
        op: the overload.
        args: positional arguments in schema order, tensors replaced by `TensorInfo`, lists by tuples.
        kwargs: keyword arguments as pairs, replaced in the same way.
        results: metadata of the flattened tensor results; None where the op returns no tensor.
    """

    op: torch._ops.OpOverload
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...]
    results: tuple[TensorInfo | None, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.op, self.args, self.kwargs, self.results))

    @cached_property
    def bound(self) -> dict[str, object]:
        """Every schema argument by name, defaults filled in."""
        values = {parameter.name: parameter.default for parameter in parameters_of(self.op)}
        names = [parameter.name for parameter in parameters_of(self.op)]
        values.update(zip(names, self.args, strict=False))
        values.update(self.kwargs)
        return values

    def arg(self, name: str) -> Any:
        """The value bound to the schema argument `name`. Raises: RuleError: the op has no such argument."""
        try:
            return self.bound[name]
        except KeyError:
            known = ", ".join(self.bound)
            raise RuleError(f"{self.op.name()} has no argument {name!r}; it has {known}") from None

    @cached_property
    def flat_operands(self) -> tuple[Operand, ...]:
        """The tensors of the call in schema order, those inside lists included."""
        return tuple(self._operands())

    def _operands(self) -> Iterator[Operand]:
        for parameter in parameters_of(self.op):
            value = self.bound[parameter.name]
            mutated = parameter.mutated and not self._only_reads(parameter.name)
            if isinstance(value, TensorInfo):
                yield Operand(parameter.name, value, None, mutated, parameter.out)
            elif parameter.is_tensor and isinstance(value, tuple):
                for position, info in enumerate(value):
                    if isinstance(info, TensorInfo):
                        yield Operand(parameter.name, info, position, mutated, parameter.out)

    def _only_reads(self, name: str) -> bool:
        """Whether what the schema calls written is not: a fused step writes gradients that it unscales.

        None writes its counters, whatever Adagrad's schema says.
        """
        return name == "state_steps" or (name == "grads" and self.bound.get("grad_scale", self) is None)

    @cached_property
    def operands(self) -> tuple[TensorInfo, ...]:
        """Metadata of all tensor operands, flattened in schema order (positional, then keyword)."""
        return tuple(operand.info for operand in self.flat_operands)

    def __str__(self) -> str:
        shapes = ", ".join(str(list(info.shape)) for info in self.operands)
        return f"{self.op.name()}({shapes})"


# -------------------------------------------------- which results are tensors that were given


def aliases_of(call: Call) -> tuple[int | None, ...]:
    """Per flattened result, the operand that the op writes and returns as this result, or None.

    Empty where data decide what the results are: see `aliases_of_returns`.
    """
    found = aliases_of_returns(call)
    more = len(call.results) - len(found)  # a list of results is one return
    return found[: len(call.results)] + (None,) * more


def aliases_of_returns(call: Call) -> tuple[int | None, ...]:
    """As `aliases_of`, per return of the schema: known before the results are."""
    names = [operand.name for operand in call.flat_operands]
    return tuple([names.index(name) if name in names else None for name in _alias_sets(call.op)])


@remembered(4096)
def _alias_sets(op: torch._ops.OpOverload) -> tuple[str | None, ...]:
    writes = {
        frozenset(argument.alias_info.before_set): argument.name
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    found: list[str | None] = []
    for result in op._schema.returns:
        info = result.alias_info
        found.append(writes.get(frozenset(info.before_set)) if info is not None and info.is_write else None)
    return tuple(found)

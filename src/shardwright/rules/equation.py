"""A formula bound to one call: every dim of every tensor spelled out in labels with sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from shardwright.rules.formula import Formula, Hom

Sizes = tuple[int, ...]
UNTOLD = -2  # in place of a label: `_`, a dim whose size the rule does not tell


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor of a dim: a label of the equation by index, or an uncut number (`label` < 0)."""

    label: int
    size: int = 1

    def length(self, sizes: Sizes) -> int:
        """Its size when the labels have these sizes."""
        return self.size if self.label < 0 else sizes[self.label]


@dataclass(frozen=True, slots=True)
class Dim:
    """One dim of a tensor: the product of its factors, outer to inner."""

    factors: tuple[Factor, ...]

    def around(self, at: int, sizes: Sizes) -> tuple[int, int]:
        """The products of the factors outside and inside the one at index `at`."""
        lengths = [factor.length(sizes) for factor in self.factors]
        return prod(lengths[:at]), prod(lengths[at + 1 :])


@dataclass(frozen=True, slots=True)
class Slot:
    """One operand or result of the equation.

    Args:
        name: the schema argument, or `result 0`.
        dims: its dims; empty also for a tensor that is always whole.
        metadata: a pending value is as good as a finished one.
        anything: any placement is as good as another.
        mutated: the op writes into it.
        out: it is only written (an `out=` argument).
    """

    name: str
    dims: tuple[Dim, ...]
    metadata: bool = False
    anything: bool = False
    mutated: bool = False
    out: bool = False

    def find(self, label: int) -> tuple[int, int] | None:
        """The dim and the factor where `label` stands; None if this tensor lacks it."""
        for dim, entry in enumerate(self.dims):
            for at, factor in enumerate(entry.factors):
                if factor.label == label:
                    return dim, at
        return None

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Its shape when the labels have these sizes."""
        shape = []  # asked at every step of a search: nothing is called here
        for dim in self.dims:
            length = 1
            for factor in dim.factors:
                length *= factor.size if factor.label < 0 else sizes[factor.label]
            shape.append(length)
        return tuple(shape)


@dataclass(frozen=True, slots=True)
class BoundHom:
    """A `Hom` whose arguments are operands, by index."""

    operands: frozenset[int]
    fact: Hom


@dataclass(frozen=True)
class Equation:
    """A rule for one call on one axis: which labels exist, how long they are, which may be cut.

    Args:
        formula: where it comes from.
        labels: their names.
        sizes: their logical sizes, in the order of `labels`.
        whole: the labels that must not be cut.
        operands: one per flattened operand of the call.
        results: one per flattened result; None where the op returns no tensor.
        aliases: per result, the operand that it is (in-place and out=), or None.
        homs: the algebraic facts.
        ints: arguments of the local call that are the local size of a label.
        shapes: arguments of the local call that are a local shape.
    """

    formula: Formula
    labels: tuple[str, ...]
    sizes: Sizes
    whole: frozenset[int]
    operands: tuple[Slot, ...]
    results: tuple[Slot | None, ...]
    aliases: tuple[int | None, ...]
    homs: tuple[BoundHom, ...] = ()
    ints: tuple[tuple[str, int], ...] = ()
    shapes: tuple[tuple[str, tuple[Dim, ...]], ...] = ()

    @cached_property
    def cuttable(self) -> tuple[int, ...]:
        """The labels that may be cut, in order of appearance."""
        return tuple(label for label in range(len(self.labels)) if label not in self.whole)

    @cached_property
    def mutated(self) -> tuple[int, ...]:
        """The operands that the op writes into."""
        return tuple(operand for operand, slot in enumerate(self.operands) if slot.mutated)

    @cached_property
    def grouped(self) -> bool:
        """Whether a dim has several factors: then what one axis may do depends on earlier axes."""
        slots = [*self.operands, *(slot for slot in self.results if slot is not None)]
        return any(len(dim.factors) > 1 for slot in slots for dim in slot.dims)

    @cached_property
    def same_shape(self) -> bool:
        """Elementwise with equal shapes (one-element operands aside): any partition of elements will do."""
        if not self.formula.elementwise:
            return False
        slots = [*self.operands, *(slot for slot in self.results if slot is not None)]
        shapes = {slot.shape(self.sizes) for slot in slots if slot.dims}
        shapes.discard(())
        if not shapes:
            return True  # all of one element, without dims
        return len({shape for shape in shapes if prod(shape) != 1} or shapes) == 1

    def lacks(self, result: int, label: int) -> bool:
        """Whether a cut of `label` makes this result pending: it depends on it without showing it."""
        slot = self.results[result]
        if slot is None or slot.find(label) is not None:
            return False
        return any(
            self.operands[operand].find(label) is not None and self.needs(result, operand)
            for operand in range(len(self.operands))
        )

    def needs(self, result: int, operand: int) -> bool:
        """Whether the values of this result depend on the values of this operand."""
        names = dict(self.formula.depends).get(result)
        slot = self.operands[operand]
        if slot.metadata or slot.out:
            return False
        return names is None or slot.name in names

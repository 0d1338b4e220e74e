"""A plan: the steps from one layout to another, what they move, and the least that could be moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from shardwright.layout.layout import Layout
from shardwright.plan.lines import Ints
from shardwright.plan.step import Step, most_held
from shardwright.plan.steps import total
from shardwright.plan.work import Seat

_LISTED = 8


@dataclass(frozen=True, eq=False)
class Plan:
    """How tensors of layout `source` become tensors of layout `target`, on the same mesh or on another one.

    Not bound to ranks or data. The byte counts that are no fields are computed when first asked for.

    reason: in one line, why these steps. lower_bound: the fewest bytes that could cross between ranks, over
    all ranks. slow: the axes that were said to cross slow links; slow_bound: the fewest bytes that could
    cross these.
    """

    source: Layout
    target: Layout
    steps: tuple[Step, ...]
    reason: str
    lower_bound: int
    slow: frozenset[int] = frozenset()
    slow_bound: int = 0
    for_rank: dict[object, object] = field(default_factory=dict, repr=False)  # what an executor keeps

    @property
    def rounds(self) -> int:
        """Steps that must wait for data of another rank."""
        return sum(step.rounds for step in self.steps)

    @cached_property
    def is_between(self) -> bool:
        """True if the two layouts are on two meshes: seats are then ranks; others do nothing."""
        return self.source.mesh_shape != self.target.mesh_shape

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Everybody who is in one of the meshes, in the order in which steps count them."""
        if not self.is_between:
            return self.source.ranks
        return tuple(sorted({*self.source.ranks, *self.target.ranks}))

    def names(self, axes: Sequence[int]) -> str:
        """What a record calls these axes, over which ranks communicate."""
        if self.is_between:
            return " -> ".join(f"({', '.join(layout.axes)})" for layout in (self.source, self.target))
        named = list(map(self.source.axes.__getitem__, axes))
        return named[0] if len(named) == 1 else f"({', '.join(named)})"

    def rank_at(self, seat: Seat) -> int:
        """The rank of a seat."""
        return seat if isinstance(seat, int) else self.source.mesh_shape.rank_at(seat)

    @cached_property
    def crosses_several_axes(self) -> bool:
        """True if one step crosses more than one axis."""
        return any(len(step.axes) > 1 for step in self.steps)

    @cached_property
    def form(self) -> tuple[object, ...]:
        """What plans must have in common to share collectives: meshes, kinds of steps, axes they cross."""
        kinds = tuple(step.form for step in self.steps)
        return self.source.mesh_shape, self.target.mesh_shape, kinds

    @cached_property
    def total_bytes(self) -> int:
        """Bytes that cross between ranks, over all ranks. Pieces move what the whole would."""
        return self.source.itemsize * sum(step.moved for step in self.steps)

    @cached_property
    def slow_bytes(self) -> int:
        """Bytes that cross between ranks which differ on a slow axis."""
        return self.source.itemsize * sum(step.crossing(self.slow) for step in self.steps)

    @cached_property
    def traffic(self) -> dict[int, tuple[int, int]]:
        """Bytes that each rank sends and receives."""
        shape = (len(self.ranks),) if self.is_between else self.source.sizes
        size = self.source.itemsize
        both = [np.broadcast_to(size * counts, shape).ravel().tolist() for counts in self._moved]
        return dict(zip(self.ranks, zip(*both, strict=True), strict=True))

    @cached_property
    def max_bytes(self) -> int:
        """The most bytes that one rank sends, or receives, over all steps."""
        return self.source.itemsize * max(int(counts.max()) for counts in self._moved)

    @cached_property
    def _moved(self) -> tuple[Ints, Ints]:
        return total([step.traffic() for step in self.steps])

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes that one rank holds beside its source: what steps make, and their buffers."""
        return self.source.itemsize * int(most_held(self.steps, self.source.dtype)[0].max())

    def __str__(self) -> str:
        meshes = f"  {_mesh_text(self.source)} -> {_mesh_text(self.target)}\n" if self.is_between else ""
        head = (
            f"{self.source} -> {self.target}\n{meshes}"
            f"  {self.total_bytes} B in all (at least {self.lower_bound} B), at most {self.max_bytes} B on "
            f"one rank, {self.rounds} round{'' if self.rounds == 1 else 's'}; {self.reason}"
        )
        if self.slow:
            names = ", ".join(self.source.axes[axis] for axis in sorted(self.slow))
            head += f"\n  {self.slow_bytes} B over the slow {names} (at least {self.slow_bound} B)"
        axes = () if self.is_between else self.source.axes
        lines = [f"  {i}. {step.describe(axes)}" for i, step in enumerate(self.steps, 1)]
        return "\n".join([head, *lines])


def _mesh_text(layout: Layout) -> str:
    ranks = layout.ranks
    listed = ", ".join(map(str, ranks if len(ranks) <= _LISTED else ranks[:2]))
    rest = "" if len(ranks) <= _LISTED else f", ... {ranks[-1]}"
    return f"{layout.mesh_shape!r} of rank{'s' if len(ranks) > 1 else ''} {listed}{rest}"

"""A plan whose two layouts are on two meshes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardwright.layout.layout import Layout
from shardwright.plan.plan import Plan
from shardwright.plan.steps_between import Between, carries_of, held_by

_LISTED = 8


@dataclass(frozen=True, eq=False)
class PlanBetween(Plan):
    """How a tensor goes from the ranks of one mesh to those of another. Ranks in neither do nothing."""

    steps: tuple[Between, ...]  # type: ignore[assignment]  # other steps that answer the same questions

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Everybody who is in one of the meshes."""
        return tuple(sorted({*self.source.ranks, *self.target.ranks}))

    @cached_property
    def form(self) -> tuple[object, ...]:
        """What plans must have in common to share messages: the meshes, and kinds of steps."""
        kinds = tuple(step.form for step in self.steps)
        return self.source.mesh_shape, self.target.mesh_shape, kinds

    @cached_property
    def total_bytes(self) -> int:
        """Bytes that cross between ranks, over all ranks."""
        return self.source.itemsize * sum(carry.moved for carry in carries_of(self.steps))

    @cached_property
    def traffic(self) -> dict[int, tuple[int, int]]:
        """Bytes that each rank sends and receives."""
        both = dict.fromkeys(self.ranks, (0, 0))
        size = self.source.itemsize
        for carry in carries_of(self.steps):
            for rank, (sent, got) in carry.traffic.items():
                both[rank] = (both[rank][0] + size * sent, both[rank][1] + size * got)
        return both

    @cached_property
    def max_bytes(self) -> int:
        """The most bytes that one rank sends, or receives, over all steps."""
        return max(max(pair) for pair in self.traffic.values())

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes that one rank holds beside its source: the results of a step and its messages."""
        return self.source.itemsize * max(held_by(self.steps, rank) for rank in self.ranks)

    def __str__(self) -> str:
        head, *lines = super().__str__().split("\n")
        meshes = f"  {_mesh_text(self.source)} -> {_mesh_text(self.target)}"
        return "\n".join([head, meshes, *lines])


def _mesh_text(layout: Layout) -> str:
    ranks = layout.ranks
    listed = ", ".join(map(str, ranks if len(ranks) <= _LISTED else ranks[:2]))
    rest = "" if len(ranks) <= _LISTED else f", ... {ranks[-1]}"
    return f"{layout.mesh_shape!r} of rank{'s' if len(ranks) > 1 else ''} {listed}{rest}"

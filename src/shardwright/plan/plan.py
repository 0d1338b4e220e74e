"""A plan: the steps from one layout to another, what they move, and the least that could be moved."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from shardwright.layout.layout import Layout
from shardwright.plan.cost import all_reduced, exchanged, traffic
from shardwright.plan.memory import peak_elements
from shardwright.plan.slow_axes import slow_elements
from shardwright.plan.steps import Exchange, Step, moves_of


@dataclass(frozen=True, eq=False)
class Plan:
    """How tensors of layout `source` become tensors of layout `target`. Not bound to ranks or data.

    reason: in one line, why these steps. lower_bound: the fewest bytes that could cross between ranks, over
    all ranks. slow: the axes that were said to cross slow links; slow_bound: the fewest bytes that could
    cross these. The other byte counts are computed when first asked for.
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
    def crosses_several_axes(self) -> bool:
        """True if one exchange crosses more than one axis."""
        return any(isinstance(step, Exchange) and len(step.axes) > 1 for step in self.steps)

    @cached_property
    def form(self) -> tuple[object, ...]:
        """What plans must have in common to share collectives: kinds of steps, and axes they cross."""
        return self.source.mesh_shape, tuple(step.form for step in self.steps)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes that cross between ranks, over all ranks. Pieces move what the whole would."""
        return self.source.itemsize * sum(
            exchanged(step) if isinstance(step, Exchange) else all_reduced(step)
            for step in moves_of(self.steps, in_pieces=False)
        )

    @cached_property
    def slow_bytes(self) -> int:
        """Bytes that cross between ranks which differ on a slow axis."""
        moves = moves_of(self.steps, in_pieces=False)
        return self.source.itemsize * sum(slow_elements(step, self.slow) for step in moves)

    @cached_property
    def max_bytes(self) -> int:
        """The most bytes that one rank sends, or receives, over all steps."""
        both = [traffic(step) for step in moves_of(self.steps)]
        most = max((int(sum(moved).max()) for moved in zip(*both, strict=True)), default=0)
        return self.source.itemsize * most

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes that one rank holds beside its source: what steps make, and their buffers."""
        return self.source.itemsize * peak_elements(self.steps, self.target)

    def __str__(self) -> str:
        head = (
            f"{self.source} -> {self.target}\n"
            f"  {self.total_bytes} B in all (at least {self.lower_bound} B), at most {self.max_bytes} B on "
            f"one rank, {self.rounds} round{'' if self.rounds == 1 else 's'}; {self.reason}"
        )
        if self.slow:
            names = ", ".join(self.source.axes[axis] for axis in sorted(self.slow))
            head += f"\n  {self.slow_bytes} B over the slow {names} (at least {self.slow_bound} B)"
        lines = [f"  {i}. {step.describe(self.source.axes)}" for i, step in enumerate(self.steps, 1)]
        return "\n".join([head, *lines])

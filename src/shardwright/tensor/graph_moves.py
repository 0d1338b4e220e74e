"""Moves of tensors whose sizes are symbols of a graph: what ranks send is the same function of any size.

A plan is made for numbers. Here stand the moves that need none: each axis goes from one of the plain
placements to another, and what it cuts it cuts evenly, of which a graph asks the symbol. Ranks send what the
plan for the numbers has them send, in the same order: another rank may have a graph for these numbers alone.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch

from shardwright.comm.functional import exchange_rows, gather_rows, reduce_over, sum_in_order
from shardwright.compat.graph_order import made_of
from shardwright.layout.layout import Layout
from shardwright.placement.base import Partition, Pending, Placement
from shardwright.placement.partial import Partial
from shardwright.placement.shard import Shard
from shardwright.plan import network
from shardwright.plan.decide import one_round_bytes
from shardwright.tensor.graph_spec import GraphSpec
from shardwright.tensor.spec import Spec

if TYPE_CHECKING:
    from shardwright.tensor.dtensor import DTensor

_SUM = Partial("sum")


def moved(x: DTensor, target: Spec, reason: str) -> torch.Tensor | None:
    """The local tensor of `x` in the layout of `target`, of the same sizes; None: only a plan can tell."""
    source = x._spec
    if not isinstance(source, GraphSpec) or not isinstance(target, GraphSpec) or source.coords is None:
        return None
    steps = None if _is_planned(source) else _steps(source, target)
    if steps is None or any(s.dim is not None and x.shape[s.dim] % source.mesh.size(s.axis) for s in steps):
        return None
    if any(step.gathers for step in steps) and not _is_even(source):
        return None
    local = x._local_tensor.resolve_conj().resolve_neg()
    for step in steps:
        local = step.run(local, source, reason)
    return local


def _is_planned(spec: GraphSpec) -> bool:
    """Does a plan look at more than the placements? At what repeats, what is empty, and at slow axes."""
    return bool(network.current.slow_axes) or 0 in spec.shown.layout.stride or 0 in spec.shown.layout.shape


def _is_even(spec: GraphSpec) -> bool:
    """Have all ranks equally much? A plan gathers other parts by messages of other sizes."""
    layout = spec.shown.layout
    cuts = [(axis, dim) for dim in range(len(layout.shape)) for axis in _cuts(layout, dim)]
    plain = all(layout.placements[axis] == Shard(dim) for axis, dim in cuts)
    return plain and not any(spec.sizes[dim] % layout.sizes[axis] for axis, dim in cuts)


class _Step:
    """One axis from one placement to another. dim: the one that is cut before or after, if any."""

    def __init__(self, axis: int, before: Placement, after: Placement, dims: int) -> None:
        self.axis, self.before, self.after = axis, before, after
        cuts = [dim for dim in range(dims) if Shard(dim) in (before, after)]
        self.dim = cuts[0] if cuts else None
        self.gathers = len(cuts) == 1 and before == Shard(cuts[0]) and after.is_replicated
        self.takes = len(cuts) == 1 and before.is_replicated
        self.scatters = len(cuts) == 1 and before == _SUM
        self.sums = before == _SUM and after.is_replicated
        self.embeds = before.is_replicated and isinstance(after, Pending)

    @property
    def is_known(self) -> bool:
        """Does it need no plan?"""
        return self.gathers or self.takes or self.scatters or self.sums or self.embeds

    def run(self, local: torch.Tensor, spec: GraphSpec, reason: str) -> torch.Tensor:
        """What this rank holds after it."""
        mesh, coord = spec.mesh, (spec.coords or ())[self.axis]
        n, group, dim = mesh.size(self.axis), mesh.get_group(self.axis), self.dim or 0
        told: dict[str, Any] = {"axis": spec.shown.layout.axes[self.axis], "reason": reason}
        if self.sums and _goes_whole(spec, n):
            terms = local.expand(n, *local.shape)
            return sum_in_order(exchange_rows(terms, [1] * n, [1] * n, group, **told))
        if self.sums:
            return reduce_over(local, "sum", group, **told)
        if isinstance(self.after, Pending):
            term = self.after.embed(local, n, coord)
            return made_of(term, local) if coord else term
        if self.gathers:
            return torch.cat(gather_rows(local.unsqueeze(0), [1] * n, group, **told).unbind(0), dim)
        part = local.shape[dim] // n
        if self.takes:
            return local.narrow(dim, coord * part, part).contiguous()
        parts = local.unflatten(dim, (n, part)).movedim(dim, 0)
        return sum_in_order(exchange_rows(parts, [1] * n, [1] * n, group, **told))


def _goes_whole(spec: GraphSpec, terms: int) -> bool:
    """Does each rank send its whole term to the others? A graph asks it of the sizes, as a plan does."""
    layout = spec.shown.layout
    copies = prod(n for p, n in zip(layout.placements, layout.sizes, strict=True) if not p.is_partition)
    moved = (terms - 1) * copies * prod(spec.sizes) * layout.itemsize
    return moved <= one_round_bytes() * prod(layout.sizes)


def _steps(source: GraphSpec, target: GraphSpec) -> list[_Step] | None:
    """Those of the axes that change; None where one needs a plan, or its dim is cut by others too."""
    before, after = source.shown.layout, target.shown.layout
    pairs = zip(before.placements, after.placements, strict=True)
    steps = [_Step(axis, a, b, len(before.shape)) for axis, (a, b) in enumerate(pairs) if a != b]
    if before.mesh_shape != after.mesh_shape or not all(step.is_known for step in steps):
        return None
    if len(steps) > 1 and any(step.gathers or step.scatters or step.sums for step in steps):
        return None  # a plan of several axes takes them in an order of its own, and sends less
    cuts = [(step.axis, step.dim) for step in steps if step.dim is not None]
    alone = all(_cuts(layout, dim) <= {axis} for axis, dim in cuts for layout in (before, after))
    return steps if alone else None


def _cuts(layout: Layout, dim: int) -> set[int]:
    """The axes that cut this dim, or several of which it is one."""
    return {
        axis
        for axis, (p, n) in enumerate(zip(layout.placements, layout.sizes, strict=True))
        if isinstance(p, Partition) and dim in p.cut_dims(layout.shape, n)
    }

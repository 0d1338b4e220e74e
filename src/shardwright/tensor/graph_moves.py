"""Moves of tensors whose sizes are symbols of a graph: what ranks send is the same function of any size.

A plan is made for numbers. Here stand the moves that need none: each axis goes from one of the plain
placements to another, and what it cuts it cuts evenly, of which a graph asks the symbol. Ranks send what the
plan for the numbers has them send, in the same order: another rank may have a graph for these numbers alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwright.comm.functional import exchange_rows, gather_rows, reduce_over, sum_in_order
from shardwright.compat.graph_order import made_of
from shardwright.layout.layout import Layout
from shardwright.placement.base import Partition, Pending, Placement
from shardwright.placement.partial import Partial
from shardwright.placement.shard import Shard
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
    steps = _steps(source, target)
    if steps is None or any(s.dim is not None and x.shape[s.dim] % source.mesh.size(s.axis) for s in steps):
        return None
    local = x._local_tensor
    for step in steps:
        local = step.run(local, source, reason)
    return local


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

    def run(self, local: torch.Tensor, spec: Spec, reason: str) -> torch.Tensor:
        """What this rank holds after it."""
        mesh, coord = spec.mesh, (spec.coords or ())[self.axis]
        n, group, dim = mesh.size(self.axis), mesh.get_group(self.axis), self.dim or 0
        told: dict[str, Any] = {"axis": spec.shown.layout.axes[self.axis], "reason": reason}
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


def _steps(source: GraphSpec, target: GraphSpec) -> list[_Step] | None:
    """Those of the axes that change; None where one needs a plan, or its dim is cut by others too."""
    before, after = source.shown.layout, target.shown.layout
    pairs = zip(before.placements, after.placements, strict=True)
    steps = [_Step(axis, a, b, len(before.shape)) for axis, (a, b) in enumerate(pairs) if a != b]
    if before.mesh_shape != after.mesh_shape or not all(step.is_known for step in steps):
        return None
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

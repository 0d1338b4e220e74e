"""Which axes of the context each strategy takes."""

from __future__ import annotations

import math

from torch.distributed.device_mesh import DeviceMesh

from shardwright.compat import axis_names
from shardwright.context.context import DistributedContext
from shardwright.context.degrees import Degrees
from shardwright.context.domains import BATCH_DOMAIN, DENSE_DOMAIN, EXPERT_DOMAIN, REGULAR_DOMAIN
from shardwright.context.submesh import submesh
from shardwright.layout.mesh_shape import ranks_of
from shardwright.parallel.table.words import (
    BATCH_NORM,
    CONTEXT,
    EXPERT,
    FSDP,
    HSDP,
    REPLICATE,
    SEQUENCE,
    TENSOR,
)

_DEGREE = {
    TENSOR: "tensor_parallel",
    SEQUENCE: "tensor_parallel",
    CONTEXT: "context_parallel_shard",
    FSDP: "data_parallel_shard",
}


class Axes:
    """The axes of a context, as the strategies of one table divide them.

    Where a row cuts sequences (`context`), the context ranks are one axis, `cp`, and data parallelism has the
    data ranks alone; sharded units (`shard`) are cut over both, where context ranks are of one kind and the
    row is of the whole model: what computes outside of the cut has a complete gradient on each of them. Where
    no row does, who cuts sequences is the user's affair: context ranks read other tokens, as data ranks do,
    and share the axes of the dense domain with them.

    Args: cuts_all: the sequences are cut in the whole model.
    """

    def __init__(
        self, context: DistributedContext, strategies: frozenset[str], *, cuts_all: bool = True
    ) -> None:
        self.context = context
        self.degrees: Degrees = context.parameters
        self.cuts_sequence = CONTEXT in strategies
        self._last = "dp_shard" if self.cuts_sequence else "dp_cp_shard"
        others = ("dp_replicate",) if self.cuts_sequence else ("dp_replicate", "cp_replicate")
        self._dense = context.mesh_for(REGULAR_DOMAIN if self.cuts_sequence else DENSE_DOMAIN)
        self.replicas = tuple(axis for axis in others if self.size(axis) > 1)
        apart = self.cuts_sequence and (not cuts_all or self.degrees.context_parallel_replicate > 1)
        self.shard = "dp_shard" if apart else "dp_cp_shard"
        self._units = self._dense if apart else context.mesh_for(DENSE_DOMAIN)

    def size(self, axis: str) -> int:
        """How many ranks an axis of the dense parameters has."""
        return self._dense[axis].size()

    @property
    def data(self) -> tuple[str, ...]:
        """The axes whose ranks read other data."""
        return (*self.replicas, *((self._last,) if self.size(self._last) > 1 or not self.replicas else ()))

    @property
    def data_ranks(self) -> int:
        """How many ranks read other data."""
        return math.prod(self.size(axis) for axis in self.data)

    def cover_data(self, mesh: DeviceMesh) -> bool:
        """Are all ranks that read other data, beside this one, among those of a mesh?"""
        return ranks_of(self.mesh(REPLICATE)) <= ranks_of(mesh)

    def mesh(self, strategy: str) -> DeviceMesh:
        """The axes that a strategy is applied on."""
        context = self.context
        if strategy in (TENSOR, SEQUENCE):
            return submesh(self._dense, "tp")
        if strategy == CONTEXT:
            return submesh(context.mesh_for(BATCH_DOMAIN), "cp")
        if strategy == EXPERT:
            return submesh(context.mesh_for(EXPERT_DOMAIN), ("ep_replicate", "ep_shard"))
        if strategy in (REPLICATE, BATCH_NORM):
            return submesh(self._dense, self.data)
        if strategy == HSDP:
            return submesh(self._units, (*self.replicas, self.shard))
        return submesh(self._units, self.shard)

    def problems(self, strategies: frozenset[str], before: frozenset[str]) -> list[str]:
        """Rows for which the context has no ranks, and ranks for which there is no row.

        Args: before: the axes that parameters live on already.
        """
        if self.context.world_size == 1:
            return []  # every strategy is what one device does
        found = [
            f"{name!r} has no axis to cut over: {_DEGREE[name]} is 1 in this context\n    fix: build the "
            f"context with {_DEGREE[name]} above 1, or leave the row out{self._instead(name)}"
            for name in _DEGREE
            if name in strategies and self.mesh(name).size() == 1 and not (name == FSDP and self.replicas)
        ]
        if FSDP in strategies and self.replicas:
            found.append(
                f"'fsdp' cuts over {self.shard} ({self.mesh(FSDP).size()} ranks), and nobody would sum "
                f"gradients over {' and '.join(self.replicas)}\n    fix: 'hsdp', which cuts over the one and "
                "replicates over the others"
            )
        cut = self.degrees.context_parallel_shard * self.degrees.context_parallel_replicate > 1
        if self.context.dropout == "logical" and not self.cuts_sequence and cut:
            found.append(
                "context.seed(..., dropout='logical') and context ranks, but no row says 'context': where "
                "the tokens of a rank are in a sequence that you cut by hand is unknown\n"
                '    fix: "" = "context", or dropout=\'own\''
            )
        if self.degrees.tensor_parallel > 1 and TENSOR not in strategies and "tp" not in before:
            found.append(
                f"tensor_parallel is {self.degrees.tensor_parallel}, and no row uses it: these ranks would "
                "all compute the same\n    fix: a row of tensor parallelism ('auto', 'colwise', ...), or "
                "tensor_parallel=1"
            )
        if self.degrees.expert_parallel > 1 and EXPERT not in strategies and "ep_shard" not in before:
            found.append(
                f"expert_parallel is {self.degrees.expert_parallel}, and no row spreads experts\n"
                '    fix: "" = "expert", or expert_parallel=1'
            )
        return found

    def _instead(self, name: str) -> str:
        """What cuts where there are context ranks alone, which are no axis of 'fsdp' beside 'context'."""
        ranks = self.degrees.context_parallel_replicate
        if name != FSDP or ranks == 1:
            return ""
        return (
            f"; over ranks that share a sequence 'hsdp' replicates, and 'fsdp' cuts where they are "
            f"context_parallel_shard, not context_parallel_replicate={ranks}"
        )


def stage_of(context: DistributedContext) -> DeviceMesh:
    """The ranks that hold the same stage: every axis but that of the pipeline."""
    mesh = context.mesh_for(REGULAR_DOMAIN)
    return submesh(mesh, [axis for axis in axis_names(mesh) if axis != "pp"])

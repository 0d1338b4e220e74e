"""Over what an exchange travels: the process group of one axis, or messages between pairs of ranks.

No group is ever made here. One axis of a mesh has its group; an exchange over several axes uses
point-to-point messages of the default group, which every rank has, so that no bystander takes part. (Groups
made when a plan first runs would be made by a part of the ranks only: the others then wait for ever.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardwright.comm import functional
from shardwright.comm.dtype import as_bytes, moves_natively
from shardwright.comm.record import Sending, recording
from shardwright.comm.uncounted import say_if_uncounted
from shardwright.plan.holders import Coords
from shardwright.plan.plan import Plan
from shardwright.plan.steps import Exchange
from shardwright.plan.transfer import members_of

# Keeps our messages apart from the user's own untagged ones (gloo; NCCL orders them by issue).
TAG = 53187


@dataclass(frozen=True, slots=True)
class GroupWire:
    """A process group. `members`: the mesh coordinates of its ranks, in its order."""

    members: tuple[Coords, ...]
    group: ProcessGroup
    axis: str

    def exchange(
        self, buffer: Tensor, out_counts: Sequence[int], in_counts: Sequence[int], reason: str
    ) -> Tensor:
        """Send `in_counts[i]` elements to member i, receive `out_counts[i]`, flat, in member order."""
        return functional.exchange_rows(
            buffer, out_counts, in_counts, self.group, axis=self.axis, reason=reason
        )

    def gather(self, buffer: Tensor, reason: str) -> Tensor:
        """Everybody's buffer, all of one length, one after the other."""
        sizes = [buffer.numel()] * len(self.members)
        return functional.gather_rows(buffer, sizes, self.group, axis=self.axis, reason=reason)


@dataclass(frozen=True, slots=True)
class PeerWire:
    """Messages between pairs of ranks. `ranks`: the global ranks of `members`."""

    members: tuple[Coords, ...]
    ranks: tuple[int, ...]
    axis: str

    def exchange(
        self, buffer: Tensor, out_counts: Sequence[int], in_counts: Sequence[int], reason: str
    ) -> Tensor:
        """Send `in_counts[i]` elements to member i, receive `out_counts[i]`, flat, in member order."""
        own = self.ranks.index(dist.get_rank())
        say_if_uncounted()
        if not (recording() and (any(in_counts) or any(out_counts))):
            return self._moved(buffer, out_counts, in_counts, own)
        with Sending(
            "send_recv",
            axis=self.axis,
            bytes_sent=(sum(in_counts) - in_counts[own]) * buffer.element_size(),
            reason=reason,
            shape=tuple(buffer.shape),
            dtype=buffer.dtype,
        ):
            return self._moved(buffer, out_counts, in_counts, own)

    def _moved(self, buffer: Tensor, out_counts: Sequence[int], in_counts: Sequence[int], own: int) -> Tensor:
        if moves_natively(buffer.dtype):
            return self._exchange(buffer, out_counts, in_counts, own)
        width = buffer.element_size()
        received = self._exchange(
            as_bytes(buffer),
            [width * count for count in out_counts],
            [width * count for count in in_counts],
            own,
        )
        return received.view(buffer.dtype)

    def _exchange(
        self, buffer: Tensor, out_counts: Sequence[int], in_counts: Sequence[int], own: int
    ) -> Tensor:
        received = buffer.new_empty(sum(out_counts))
        incoming, outgoing = received.split(list(out_counts)), buffer.split(list(in_counts))
        operations = [
            dist.P2POp(function, piece, rank, tag=TAG)
            for function, pieces in ((dist.irecv, incoming), (dist.isend, outgoing))
            for rank, piece in zip(self.ranks, pieces, strict=True)
            if piece.numel() and rank != self.ranks[own]
        ]
        pending = dist.batch_isend_irecv(operations) if operations else []
        incoming[own].copy_(outgoing[own])
        for work in pending:
            work.wait()
        return received


def wire_for(step: Exchange, plan: Plan, mesh: DeviceMesh, coords: Coords) -> GroupWire | PeerWire:
    """The wire of an exchange: the group of its axis, or pairs of ranks when it crosses several axes."""
    shape = plan.source.mesh_shape
    if len(step.axes) == 1:
        group = mesh.get_group(step.axes[0])
        ranks = dist.get_process_group_ranks(group)
        return GroupWire(tuple(map(shape.coords_of, ranks)), group, shape.axes[step.axes[0]])
    return peers_of(step, plan, coords)


def peers_of(step: Exchange, plan: Plan, coords: Coords) -> PeerWire:
    """The ranks that an exchange joins, for messages between pairs of them."""
    shape = plan.source.mesh_shape
    members = members_of(step, coords)
    names = [shape.axes[axis] for axis in step.axes]
    label = names[0] if len(names) == 1 else f"({', '.join(names)})"
    return PeerWire(members, tuple(shape.rank_at(member) for member in members), label)

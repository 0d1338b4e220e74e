"""Transfers and reductions over one axis of a mesh, whose ranks have a process group: one collective each.

No group is ever made here. One axis of a mesh has its group; what crosses several axes goes as messages of
the default group (`mailbox`), which every rank has, so that no bystander takes part. (Groups made when a plan
first runs would be made by a part of the ranks only: the others then wait for ever.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwright.comm import functional
from shardwright.comm.dtype import NATIVE
from shardwright.comm.mailbox import Mailing
from shardwright.comm.pack import (
    MANY,
    arranged,
    copy_in,
    flat_memory,
    in_memory,
    joined,
    move,
    new_tensor,
    shaped,
)
from shardwright.comm.task import Task, tensor
from shardwright.compat.graph_order import made_of, part_ways
from shardwright.index.overlap import Strided, covers_in_order
from shardwright.layout.layout import Layout
from shardwright.layout.text import plain_cut
from shardwright.plan.plan import Plan
from shardwright.plan.work import Held, Memory, Reduction, Share, Transfer

Views = tuple[Strided, ...]


@dataclass(frozen=True, slots=True)
class Packing:
    """How one rank's side of a transfer lies in the buffers of a collective: member by member.

    to_send, to_fill: the views that are sent and filled, in this order; counts of elements per member.
    whole_sent: they are the source's memory from first to last, so nothing is packed; whole_filled:
    likewise the result's; then the own part goes through the collective too.
    """

    to_send: Views
    to_fill: Views
    send_counts: list[int]
    fill_counts: list[int]
    whole_sent: bool
    whole_filled: bool


def _are_alike(layout: Layout) -> bool:
    """Do equal parts make equal graphs on all ranks? Of a part in many pieces a rank may choose rows.

    The numbers of these rows are a constant of their own in each call: torch merges two equal calls of a peer
    that sends one run of its memory, and not those of this rank.
    """
    return layout.is_even and all(plain_cut(p) is not None for p in layout.placements if p.is_partition)


def packing(work: Transfer, result: Memory, ranked: Sequence[Share], own: int) -> Packing:
    """The packing for members in the order of the group, of which this rank is number `own`."""
    slot = work.kept.target.numel
    fills = [_shifted(share.receive, share.term * slot) for share in ranked]
    whole = covers_in_order(sum(fills, ()), result.numel)
    sends = [share.send for share in ranked]
    if work.gather:
        sends = sends[own : own + 1]
    elif not whole:
        sends[own] = fills[own] = ()
    to_send, to_fill = tuple(sum(sends, ())), tuple(sum(fills, ()))
    return Packing(
        to_send,
        to_fill,
        _counts(sends),
        _counts(fills),
        covers_in_order(to_send, work.kept.source.numel),
        whole,
    )


def _counts(of_members: Sequence[Views]) -> list[int]:
    counts = []
    for views in of_members:
        count = 0
        for view in views:
            count += prod(view.size)
        counts.append(count)
    return counts


def _shifted(views: Views, shift: int) -> Views:
    if not shift:
        return views
    return tuple([view._replace(start=view.start + shift) for view in views])


def _own_part(work: Transfer) -> tuple[tuple[Strided, Strided], ...]:
    """What the rank copies itself, into its own term."""
    shift = work.own_term * work.kept.target.numel
    return tuple([(a, b._replace(start=b.start + shift)) for a, b in work.kept.views])


class Exchanging(Task):
    """A transfer among the ranks of one axis as an all-to-all, or an all-gather of equal parts."""

    sends = True

    def __init__(self, work: Transfer, plan: Plan, group: ProcessGroup) -> None:
        self.work, self.plan, self.group = work, plan, group
        self.axis = plan.names(work.axes)
        slot = work.kept.target
        self.result = Memory((work.terms, *slot.shape), (slot.numel, *slot.stride)) if work.terms else slot
        shares = {plan.rank_at(share.member): share for share in work.shares}
        ranks = dist.get_process_group_ranks(group)
        ranked = [shares.get(rank) or Share(rank, (), ()) for rank in ranks]
        self.packing = packing(work, self.result, ranked, ranks.index(plan.rank_at(work.own)))
        self.keep = () if self.packing.whole_filled or work.gather else _own_part(work)
        self.in_many = len(self.keep) + len(self.packing.to_fill) >= MANY
        self.equal = work.gather and group.size() > 1 and plan.source.dtype in NATIVE

    def run(self, held: Held, why: str) -> Tensor:
        """The result; terms along a leading dim."""
        x = in_memory(cast("Tensor", held), self.work.kept.source)
        return self._unpacked(self._arrived(self._packed(x), why), x)

    def start(self, held: Held, why: str) -> Callable[[], Held]:
        """As messages: they take what is sent from the tensor before they return."""
        return Mailing(self.work, self.plan).start(held, why)

    def together(self, tasks: Sequence[Task], held: Sequence[Held], why: str) -> list[Held]:
        """One collective for all: on the wire they share a message per member."""
        alike = cast("Sequence[Exchanging]", tasks)
        if len(alike) == 1:
            return [self.run(held[0], why)]
        xs = [in_memory(tensor(x), task.work.kept.source) for task, x in zip(alike, held, strict=True)]
        buffers = [task._packed(x) for task, x in zip(alike, xs, strict=True)]
        arrived = self._gathered(buffers, why) if self.work.gather else self._exchanged(alike, buffers, why)
        return [task._unpacked(buffer, x) for task, buffer, x in zip(alike, arrived, xs, strict=True)]

    def _packed(self, x: Tensor) -> Tensor:
        """The elements to send, member by member, flat; no copy when they are all of `x` in order."""
        if self.packing.whole_sent:
            return flat_memory(x, self.work.kept.source)
        return joined(x, self.packing.to_send)

    def _arrived(self, buffer: Tensor, why: str) -> Tensor:
        if self.equal:
            return functional.gather_equal(buffer, (self.group, self.axis, why))
        if self.work.gather:
            sizes = [buffer.numel()] * self.group.size()
            return functional.gather_rows(buffer, sizes, self.group, axis=self.axis, reason=why)
        packing = self.packing
        if torch.compiler.is_compiling() and not (
            _are_alike(self.plan.source) and _are_alike(self.plan.target)
        ):
            part_ways()  # what is one exchange to a rank may be two to its peers
        return functional.exchange_rows(
            buffer, packing.fill_counts, packing.send_counts, self.group, axis=self.axis, reason=why
        )

    def _unpacked(self, received: Tensor, x: Tensor) -> Tensor:
        """The result from what arrived in one flat buffer, and from what `x` holds already."""
        if self.packing.whole_filled:
            return shaped(received, self.result)
        if self.in_many:
            made = arranged(x, self.keep, self.result, [received], self.packing.to_fill)
            if made is not None:
                return made
        out = new_tensor(x, self.result)
        if self.keep:
            move(x, out, self.keep)
        copy_in(received, out, self.packing.to_fill)
        return out if self.packing.to_fill else in_memory(made_of(out, received), self.result)

    def _gathered(self, buffers: Sequence[Tensor], why: str) -> list[Tensor]:
        received = self._arrived(torch.cat(list(buffers)), why).view(self.group.size(), -1)
        pieces = received.split([buffer.numel() for buffer in buffers], dim=1)
        return [piece.clone(memory_format=torch.contiguous_format).view(-1) for piece in pieces]

    def _exchanged(self, tasks: Sequence[Exchanging], buffers: Sequence[Tensor], why: str) -> list[Tensor]:
        packings = [task.packing for task in tasks]
        outgoing = [b.split(packed.send_counts) for b, packed in zip(buffers, packings, strict=True)]
        together = torch.cat([piece for of_member in zip(*outgoing, strict=True) for piece in of_member])
        counts_in = list(zip(*(packed.fill_counts for packed in packings), strict=True))
        counts_out = zip(*(packed.send_counts for packed in packings), strict=True)
        received = functional.exchange_rows(
            together,
            [sum(c) for c in counts_in],
            [sum(c) for c in counts_out],
            self.group,
            axis=self.axis,
            reason=why,
        )
        pieces = received.split([count for of_member in counts_in for count in of_member])
        return [torch.cat(pieces[i :: len(tasks)]) for i in range(len(tasks))]


class Reducing(Task):
    """The backend's reduction over an axis."""

    sends = True

    def __init__(self, work: Reduction, plan: Plan, group: ProcessGroup) -> None:
        self.memory, self.op, self.group = work.memory, work.op, group
        self.axis = plan.names((work.axis,))

    def run(self, held: Held, why: str) -> Tensor:
        """The reduced tensor, stored as the one given must be."""
        return shaped(self._posted(self._flat(held), why)(), self.memory)

    def start(self, held: Held, why: str) -> Callable[[], Held]:
        """What is reduced is read before it returns."""
        finish = self._posted(self._flat(held), why)
        return lambda: shaped(finish(), self.memory)

    def together(self, tasks: Sequence[Task], held: Sequence[Held], why: str) -> list[Held]:
        """One reduction of all tensors in a row; then each has memory of its own.

        Views of what was reduced would share a version counter: a write into one would count for all.
        """
        alike = cast("Sequence[Reducing]", tasks)
        if len(alike) == 1:
            return [self.run(held[0], why)]
        row = self._posted(torch.cat([task._flat(x) for task, x in zip(alike, held, strict=True)]), why)()
        pieces = row.split([task.memory.numel for task in alike])
        return [shaped(piece.clone(), task.memory) for piece, task in zip(pieces, alike, strict=True)]

    def _flat(self, held: Held) -> Tensor:
        return flat_memory(in_memory(tensor(held), self.memory), self.memory)

    def _posted(self, flat: Tensor, why: str) -> Callable[[], Tensor]:
        return functional.start_reduction(flat, self.op, self.group, axis=self.axis, reason=why)

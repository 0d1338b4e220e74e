"""Runs a plan for all ranks in one process: the works of all ranks in turn, messages as slices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.comm.pack import copy_in, in_memory, joined, move, new_tensor
from shardwright.comm.task import Applying, Moving, filled, room
from shardwright.layout.layout import Layout
from shardwright.plan.holders import every_coords
from shardwright.plan.plan import Plan
from shardwright.plan.work import Apply, Held, InPieces, Memory, Move, Reduction, Seat, Terms, Transfer, Work


class Lockstep:
    """One run of a plan over all ranks; `sent` and `received` count the bytes that crossed, by rank."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.seats: list[Seat] = list(plan.ranks if plan.is_between else every_coords(plan.source.sizes))
        self.sent = dict.fromkeys(plan.ranks, 0)
        self.received = dict.fromkeys(plan.ranks, 0)

    @property
    def bytes_sent(self) -> int:
        return sum(self.sent.values())

    def run(self, locals_of: Sequence[Tensor]) -> list[Tensor]:
        """The locals of the target's ranks from those of the source's, each in row-major order."""
        given = dict(zip(self.plan.source.ranks, locals_of, strict=True))
        empty = torch.empty(0, dtype=self.plan.source.dtype)
        held = {seat: given.get(self.plan.rank_at(seat), empty) for seat in self.seats}
        for step in self.plan.steps:
            held = self._step({seat: step.work(seat) for seat in self.seats}, held)
        of_rank = {self.plan.rank_at(seat): x for seat, x in held.items()}
        outside = set(self.plan.ranks) - set(self.plan.target.ranks)
        assert all(tuple(of_rank[rank].shape) == (0,) for rank in outside if self.plan.steps)
        return [of_rank[rank] for rank in self.plan.target.ranks]

    def _step(self, works: dict[Seat, Work], held: dict[Seat, Held]) -> dict[Seat, Held]:
        kind = type(next(iter(works.values())))
        if kind is Move:
            return {seat: Moving(work).run(held[seat], "") for seat, work in works.items()}
        if kind is Apply:
            return {seat: Applying(work).run(held[seat], "") for seat, work in works.items()}
        run = {Transfer: self._transfer, Reduction: self._reduce, InPieces: self._pieces}[kind]
        return run(works, held)

    def _pieces(self, works: dict[Seat, InPieces], held: dict[Seat, Held]) -> dict[Seat, Held]:
        out = {seat: new_tensor(x, works[seat].target) for seat, x in held.items()}
        for piece in range(len(next(iter(works.values())).pieces)):
            mine = {seat: work.pieces[piece] for seat, work in works.items()}
            done = held
            for step in range(len(next(iter(mine.values()))[0])):
                done = self._step({seat: steps[step] for seat, (steps, _) in mine.items()}, done)
            for seat, x in done.items():
                move(x, out[seat], mine[seat][1].views)
        return out

    def _transfer(self, works: dict[Seat, Transfer], held: dict[Seat, Held]) -> dict[Seat, Held]:
        mail: dict[tuple[Seat, Seat], Tensor] = {}
        for seat, work in works.items():
            x = held[seat] = in_memory(held[seat], work.kept.source)
            assert x.shape == work.kept.source.shape
            for share in work.shares:
                if share.member != seat and share.send:
                    mail[seat, share.member] = joined(x, share.send).clone()
        results = {seat: self._result(work, held[seat], mail) for seat, work in works.items()}
        assert not mail, "sent, but never received"
        return results

    def _result(self, work: Transfer, x: Tensor, mail: dict[tuple[Seat, Seat], Tensor]) -> Held:
        if work.kept.nothing:
            assert not any(share.receive for share in work.shares)
            return x
        slots = [room(x, work.kept.target, work.kept.filling) for _ in range(max(work.terms, 1))]
        move(x, slots[work.own_term], work.kept.views)
        for share in work.shares:
            if share.member != work.own and share.receive:
                message = mail.pop((share.member, work.own))
                assert message.numel() == sum(view.numel for view in share.receive)
                self._count(share.member, work.own, message.nbytes)
                copy_in(message, slots[share.term], share.receive)
        if work.terms:
            return Terms(slots, [False] * work.terms)
        return filled(slots[0], work.kept.filling)

    def _count(self, sender: Seat, receiver: Seat, nbytes: int) -> None:
        self.sent[self.plan.rank_at(sender)] += nbytes
        self.received[self.plan.rank_at(receiver)] += nbytes

    def _reduce(self, works: dict[Seat, Reduction], held: dict[Seat, Held]) -> dict[Seat, Held]:
        out = {}
        for coords, work in works.items():
            n = self.plan.source.sizes[work.axis]
            peers = [(*coords[: work.axis], i, *coords[work.axis + 1 :]) for i in range(n)]
            out[coords] = self.plan.source.placements[work.axis].combine([held[peer] for peer in peers])
        self.sent[self.plan.ranks[0]] += sum(2 * (n - 1) * x.nbytes for x in held.values()) // n
        return out


def held_by_all(layout: Layout, full: Tensor) -> list[Tensor]:
    """What every rank holds of a tensor, stored as the layout says."""
    return [
        in_memory(
            layout.split(full, coords), Memory(layout.local_shape(coords), layout.local_stride(coords))
        ).clone()
        for coords in every_coords(layout.sizes)
    ]


def scattered_terms(layout: Layout, full: Tensor) -> list[Tensor]:
    """As `held_by_all`, with terms that differ from zero on all ranks of a single sum."""
    held = held_by_all(layout, full)
    axes = [axis for axis in layout.order if axis in layout.pending_axes]
    if len(axes) != 1 or layout.placements[axes[0]].reduce_op != "sum":
        return held
    coords = every_coords(layout.sizes)
    for i, at in enumerate(coords):
        last = (*at[: axes[0]], layout.sizes[axes[0]] - 1, *at[axes[0] + 1 :])
        if at != last:
            held[i] += at[axes[0]] + 1
            held[coords.index(last)] -= at[axes[0]] + 1
    return held

"""Runs a plan for all ranks of a mesh in one process: the steps of all ranks in turn, messages as slices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.comm.local_steps import embed, place, take
from shardwright.comm.pack import in_memory, move, new_tensor, pack, pack_once, unpack
from shardwright.comm.terms import stacked
from shardwright.layout.layout import Layout
from shardwright.plan.holders import Coords, every_coords
from shardwright.plan.plan import Plan
from shardwright.plan.steps import AllReduce, Combine, Embed, Exchange, LocalMove, Pieces, Step
from shardwright.plan.transfer import Memory, local_move, members_of, memory_of, transfer


class Lockstep:
    """One run of a plan over all ranks; `bytes_sent` counts what crossed between them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.coords = every_coords(plan.source.sizes)
        self.bytes_sent = 0

    def run(self, locals_of: Sequence[Tensor]) -> list[Tensor]:
        held = self._steps(self.plan.steps, dict(zip(self.coords, locals_of, strict=True)))
        return [held[coords] for coords in self.coords]

    def _steps(self, steps: Sequence[Step], held: dict[Coords, Tensor]) -> dict[Coords, Tensor]:
        for step in steps:
            held = self._step(step, held)
        return held

    def _pieces(self, step: Pieces, held: dict[Coords, Tensor]) -> dict[Coords, Tensor]:
        out = {coords: new_tensor(x, memory_of(step.target, coords)) for coords, x in held.items()}
        for steps, slab in zip(step.parts, step.slabs, strict=True):
            for coords, done in self._steps(steps, dict(held)).items():
                move(done, out[coords], local_move(LocalMove(slab, step.target), coords).views)
        return out

    def _step(self, step: Step, held: dict[Coords, Tensor]) -> dict[Coords, Tensor]:
        sizes = self.plan.source.sizes
        if isinstance(step, Exchange):
            return self._exchange(step, held)
        if isinstance(step, Pieces):
            return self._pieces(step, held)
        if isinstance(step, AllReduce):
            return self._all_reduce(step, held)
        if isinstance(step, LocalMove):
            return {coords: take(x, local_move(step, coords)) for coords, x in held.items()}
        if isinstance(step, Combine):
            return {coords: stacked(x).combined(step, sizes) for coords, x in held.items()}
        if isinstance(step, Embed):
            return {coords: embed(x, step, coords, sizes) for coords, x in held.items()}
        return {coords: place(x, step, local_move(step, coords), sizes) for coords, x in held.items()}

    def _exchange(self, step: Exchange, held: dict[Coords, Tensor]) -> dict[Coords, Tensor]:
        mail: dict[tuple[Coords, Coords], Tensor] = {}
        tables = {coords: transfer(step, coords, members_of(step, coords)) for coords in self.coords}
        for coords, table in tables.items():
            x = held[coords] = in_memory(held[coords], table.source)
            assert x.shape == table.source.shape
            if step.gather:
                pieces = [pack_once(x, table, table.members.index(coords))] * len(table.members)
            else:
                pieces = list(pack(x, table).split(table.send_counts))
            for peer, piece in zip(table.members, pieces, strict=True):
                mail[coords, peer] = piece.clone()
                self.bytes_sent += piece.nbytes if peer != coords else 0
        return {coords: self._receive(coords, table, mail, held) for coords, table in tables.items()}

    def _receive(self, coords, table, mail, held) -> Tensor:
        arrived = [mail[peer, coords] for peer in table.members]
        assert [piece.numel() for piece in arrived] == table.receive_counts
        return unpack(torch.cat(arrived), held[coords], table)

    def _all_reduce(self, step: AllReduce, held: dict[Coords, Tensor]) -> dict[Coords, Tensor]:
        n = self.plan.source.sizes[step.axis]
        out = {}
        for coords in held:
            peers = [(*coords[: step.axis], i, *coords[step.axis + 1 :]) for i in range(n)]
            out[coords] = self.plan.source.placements[step.axis].combine([held[peer] for peer in peers])
        self.bytes_sent += sum(2 * (n - 1) * x.nbytes for x in held.values()) // n
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

"""The steps of plans of one form: local work tensor by tensor, collectives once for all tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwright.comm import functional
from shardwright.comm.async_result import Later
from shardwright.comm.channel import GroupWire, PeerWire, peers_of, wire_for
from shardwright.comm.local_steps import embed, place, take
from shardwright.comm.messages import Arriving, mail_of, send_mail
from shardwright.comm.pack import flat_memory, in_memory, move, new_tensor, pack, pack_once, shaped, unpack
from shardwright.comm.terms import Terms, stacked
from shardwright.comm.traced import is_traced
from shardwright.plan.cost import exchanged
from shardwright.plan.holders import Coords
from shardwright.plan.plan import Plan
from shardwright.plan.steps import AllReduce, Combine, Embed, Exchange, LocalMove, Pieces, Place, Step
from shardwright.plan.transfer import Move, Transfer, local_move, memory_of, transfer

# From this many bytes per rank on, messages between pairs of ranks are faster on gloo than its collectives:
# where several ranks want the same or terms are combined, for a collective needs that repeated, and packed
# in buffers; and where nothing is repeated. Below, one collective has the lower and steadier latency.
STRAIGHT_BYTES = 256 * 1024
STRAIGHT_BYTES_UNREPEATED = 4 * 1024 * 1024

Held = Tensor | Terms

# Where a step stands in its plan: (index), or (index, piece, index in the piece).
Key = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Runner:
    """One run of plans of one form on this rank. why: what the record says about its collectives."""

    plans: Sequence[Plan]
    mesh: DeviceMesh
    coords: Coords
    why: str

    def run(self, local_tensors: Sequence[Tensor]) -> list[Tensor]:
        """All steps; one local tensor per plan."""
        return self._steps((), [plan.steps for plan in self.plans], local_tensors)

    def start(self, local: Tensor) -> Tensor | Later:
        """As `run` for one plan, but return once its last step that communicates has been posted.

        What that step sends is copied first: `local` may be written to before the result is waited for.
        """
        steps = self.plans[0].steps
        last = max((i for i, step in enumerate(steps) if step.rounds), default=None)
        if last is None or isinstance(steps[last], Pieces) or is_traced(local):
            return self.run([local])[0]
        x = self._steps((), [steps[:last]], [local])[0]
        finish = self._started((last,), cast("Exchange | AllReduce", steps[last]), x)
        return Later(lambda: self._steps((), [steps], [finish()], first=last + 1)[0])

    def _started(self, key: Key, step: Exchange | AllReduce, x: Tensor) -> Callable[[], Held]:
        if isinstance(step, Exchange):
            return self._straight(key, step, x, copies=True).wait
        memory = memory_of(step.map, self.coords)
        finish = self._start_all_reduce(step, flat_memory(in_memory(x, memory), memory))
        return lambda: shaped(finish(), memory)

    def _steps(
        self,
        key: Key,
        steps_of: Sequence[tuple[Step, ...]],
        start: Sequence[Held],
        *,
        first: int = 0,
    ) -> list[Tensor]:
        held: list[Held] = list(start)
        for index in range(first, len(steps_of[0])):
            held = self._step((*key, index), [steps[index] for steps in steps_of], held)
        return cast("list[Tensor]", held)

    def _step(self, key: Key, steps: Sequence[Step], held: list[Held]) -> list[Held]:
        if isinstance(steps[0], Combine):
            return [self._combine(cast("Combine", s), x) for s, x in zip(steps, held, strict=True)]
        whole = cast("list[Tensor]", held)  # every step but a combination gets tensors
        if isinstance(steps[0], Exchange):
            return self._exchange(key, cast("Sequence[Exchange]", steps), whole)
        if isinstance(steps[0], AllReduce):
            return self._all_reduce(cast("Sequence[AllReduce]", steps), whole)
        if isinstance(steps[0], Pieces):
            return [self._pieces(key, steps[0], whole[0])]
        return [
            self._alone(key, step, plan, x) for step, plan, x in zip(steps, self.plans, whole, strict=True)
        ]

    # --------------------------------------------------------------------------- without communication

    def _alone(self, key: Key, step: Step, plan: Plan, x: Tensor) -> Tensor:
        sizes = plan.source.sizes
        if isinstance(step, LocalMove):
            return take(x, self._move(key, plan, step))
        if isinstance(step, Place):
            return place(x, step, self._move(key, plan, step), sizes)
        return embed(x, cast("Embed", step), self.coords, sizes)

    def _combine(self, step: Combine, x: Held) -> Tensor:
        terms = x if isinstance(x, Terms) else stacked(x)
        return terms.combined(step, self.plans[0].source.sizes)

    def _move(self, key: Key, plan: Plan, step: LocalMove | Place) -> Move:
        """What this rank copies in a local step, made once per plan."""
        known = plan.for_rank.get((self.coords, key))
        if not isinstance(known, Move):
            known = plan.for_rank[self.coords, key] = local_move(step, self.coords)
        return known

    def _pieces(self, key: Key, step: Pieces, x: Tensor) -> Tensor:
        out = new_tensor(x, memory_of(step.target, self.coords))
        for piece, (steps, slab) in enumerate(zip(step.parts, step.slabs, strict=True)):
            done = self._steps((*key, piece), [steps], [x])[0]
            moved = self._move((*key, piece), self.plans[0], LocalMove(slab, step.target))
            move(in_memory(done, moved.source), out, moved.views)
            del done  # the next piece needs the memory
        return out

    # ------------------------------------------------------------------------------ with communication

    def _all_reduce(self, steps: Sequence[AllReduce], held: list[Tensor]) -> list[Held]:
        memories = [memory_of(step.map, self.coords) for step in steps]
        flats = [flat_memory(in_memory(x, memory), memory) for x, memory in zip(held, memories, strict=True)]
        flat = flats[0] if len(flats) == 1 else torch.cat(flats)
        reduced = self._start_all_reduce(steps[0], flat)()
        pieces = reduced.split([memory.numel for memory in memories])
        return [shaped(piece, memory) for piece, memory in zip(pieces, memories, strict=True)]

    def _start_all_reduce(self, step: AllReduce, flat: Tensor) -> Callable[[], Tensor]:
        group, axis = self.mesh.get_group(step.axis), self.plans[0].source.axes[step.axis]
        return functional.start_reduction(flat, step.op, group, axis=axis, reason=self.why)

    def _exchange(self, key: Key, steps: Sequence[Exchange], held: list[Tensor]) -> list[Held]:
        if len(steps) == 1 and self._goes_straight(key, steps[0], held[0]):
            return [self._straight(key, steps[0], held[0]).wait()]
        wire = self._wire(key, steps[0])
        tables = [
            self._table(key, plan, step, wire.members) for plan, step in zip(self.plans, steps, strict=True)
        ]
        held = [in_memory(x, table.source) for x, table in zip(held, tables, strict=True)]
        if steps[0].gather and isinstance(wire, GroupWire):
            arrived = _gathered(wire, tables, held, wire.members.index(self.coords), self.why)
        else:
            arrived = _exchanged(wire, tables, held, self.why)
        return [unpack(buffer, x, table) for buffer, x, table in zip(arrived, held, tables, strict=True)]

    def _wire(self, key: Key, step: Exchange) -> GroupWire | PeerWire:
        """Over what an exchange travels, found once per plan and mesh: two meshes may have one shape."""
        plan = self.plans[0]
        known = plan.for_rank.get((self.coords, key, "wire"))
        if isinstance(known, tuple) and known[0] is self.mesh:
            wire: GroupWire | PeerWire = known[1]
            return wire
        wire = wire_for(step, plan, self.mesh, self.coords)
        plan.for_rank[self.coords, key, "wire"] = self.mesh, wire
        return wire

    def _goes_straight(self, key: Key, step: Exchange, x: Tensor) -> bool:
        """Messages between pairs of ranks, without the group of an axis? All ranks decide alike."""
        if len(step.axes) != 1:
            return len(step.axes) > 1
        if is_traced(x) or x.device.type != "cpu":
            return False
        plan = self.plans[0]
        moved = plan.for_rank.get(key)
        if not isinstance(moved, int):
            moved = plan.for_rank[key] = exchanged(step) * x.element_size() // prod(step.source.sizes)
        repeated = bool(step.terms) or not step.target.cut.issuperset(step.axes)
        return moved >= (STRAIGHT_BYTES if repeated else STRAIGHT_BYTES_UNREPEATED)

    def _straight(self, key: Key, step: Exchange, x: Tensor, *, copies: bool = False) -> Arriving:
        plan = self.plans[0]
        known = plan.for_rank.get((self.coords, key, "mail"))
        if not isinstance(known, tuple):
            wire = peers_of(step, plan, self.coords)
            table = self._table(key, plan, step, wire.members)
            known = wire, table, mail_of(table, wire.members.index(self.coords))
            plan.for_rank[self.coords, key, "mail"] = known
        wire, table, mail = known
        return send_mail(wire, in_memory(x, table.source), mail, self.why, copies=copies)

    def _table(self, key: Key, plan: Plan, step: Exchange, members: tuple[Coords, ...]) -> Transfer:
        """This rank's side of an exchange, made once per plan."""
        known = plan.for_rank.get((self.coords, key))
        if isinstance(known, Transfer) and known.members == members:
            return known
        made = plan.for_rank[self.coords, key] = transfer(step, self.coords, members)
        return made


def _gathered(
    wire: GroupWire, tables: Sequence[Transfer], held: Sequence[Tensor], own: int, why: str
) -> list[Tensor]:
    """What every member's whole tensors are, one buffer per tensor."""
    buffers = [pack_once(x, table, own) for x, table in zip(held, tables, strict=True)]
    if len(buffers) == 1:
        return [wire.gather(buffers[0], why)]
    received = wire.gather(torch.cat(buffers), why).view(len(wire.members), -1)
    return [piece.reshape(-1) for piece in received.split([buffer.numel() for buffer in buffers], dim=1)]


def _exchanged(
    wire: GroupWire | PeerWire, tables: Sequence[Transfer], held: Sequence[Tensor], why: str
) -> list[Tensor]:
    """What arrives for each tensor, one buffer per tensor; on the wire they share a message per member."""
    buffers = [pack(x, table) for x, table in zip(held, tables, strict=True)]
    if len(wire.members) == 1:
        return buffers
    if len(buffers) == 1:
        return [wire.exchange(buffers[0], tables[0].receive_counts, tables[0].send_counts, why)]
    outgoing = [b.split(table.send_counts) for b, table in zip(buffers, tables, strict=True)]
    packed = torch.cat([piece for of_member in zip(*outgoing, strict=True) for piece in of_member])
    counts_in = list(zip(*(table.receive_counts for table in tables), strict=True))
    counts_out = zip(*(table.send_counts for table in tables), strict=True)
    received = wire.exchange(packed, [sum(c) for c in counts_in], [sum(c) for c in counts_out], why)
    pieces = received.split([count for of_member in counts_in for count in of_member])
    return [torch.cat(pieces[i :: len(tables)]) for i in range(len(tables))]

"""One step of several plans of the same form: local work tensor by tensor, collectives once for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwright.comm import functional
from shardwright.comm.local_steps import combine, embed, place, take
from shardwright.comm.packing import flat_memory, in_memory, pack, pack_once, shaped, unpack
from shardwright.comm.wires import GroupWire, PeerWire, wire_for
from shardwright.plan.maps import Coords
from shardwright.plan.plan import Plan
from shardwright.plan.steps import AllReduce, Combine, Embed, Exchange, LocalMove, Place
from shardwright.plan.transfer import Move, Transfer, local_move, memory_of, transfer


def run_step(
    index: int, plans: Sequence[Plan], held: list[Tensor], mesh: DeviceMesh, coords: Coords, why: str
) -> list[Tensor]:
    """Step `index` of every plan; `held` has one local tensor per plan."""
    step = plans[0].steps[index]
    if isinstance(step, Exchange):
        return _exchange(index, plans, held, mesh, coords, why)
    if isinstance(step, AllReduce):
        return _all_reduce(index, plans, held, mesh, coords, why)
    return [_alone(index, plan, local, coords) for plan, local in zip(plans, held, strict=True)]


def _alone(index: int, plan: Plan, local: Tensor, coords: Coords) -> Tensor:
    step = plan.steps[index]
    sizes = plan.source.sizes
    if isinstance(step, LocalMove):
        return take(local, _move(index, plan, coords))
    if isinstance(step, Place):
        return place(local, step, _move(index, plan, coords), sizes)
    if isinstance(step, Combine):
        return combine(local, step, sizes)
    return embed(local, cast("Embed", step), coords, sizes)


def _move(index: int, plan: Plan, coords: Coords) -> Move:
    """What this rank copies in a local step, made once per plan."""
    known = plan.for_rank.get((coords, index))
    if not isinstance(known, Move):
        known = plan.for_rank[coords, index] = local_move(
            cast("LocalMove | Place", plan.steps[index]), coords
        )
    return known


def _table(index: int, plan: Plan, coords: Coords, members: tuple[Coords, ...]) -> Transfer:
    """This rank's side of an exchange, made once per plan."""
    known = plan.for_rank.get((coords, index))
    if isinstance(known, Transfer) and known.members == members:
        return known
    made = plan.for_rank[coords, index] = transfer(cast("Exchange", plan.steps[index]), coords, members)
    return made


def _all_reduce(
    index: int, plans: Sequence[Plan], held: list[Tensor], mesh: DeviceMesh, coords: Coords, why: str
) -> list[Tensor]:
    step = cast("AllReduce", plans[0].steps[index])
    memories = [memory_of(cast("AllReduce", plan.steps[index]).map, coords) for plan in plans]
    flats = [flat_memory(in_memory(x, memory), memory) for x, memory in zip(held, memories, strict=True)]
    flat = flats[0] if len(flats) == 1 else torch.cat(flats)
    axis = plans[0].source.axes[step.axis]
    reduced = functional.reduce_over(flat, step.op, mesh.get_group(step.axis), axis=axis, reason=why)
    pieces = reduced.split([memory.numel for memory in memories])
    return [shaped(piece, memory) for piece, memory in zip(pieces, memories, strict=True)]


def _exchange(
    index: int, plans: Sequence[Plan], held: list[Tensor], mesh: DeviceMesh, coords: Coords, why: str
) -> list[Tensor]:
    step = cast("Exchange", plans[0].steps[index])
    wire = wire_for(step, plans[0], mesh, coords)
    tables = [_table(index, plan, coords, wire.members) for plan in plans]
    held = [in_memory(local, table.source) for local, table in zip(held, tables, strict=True)]
    if step.gather and isinstance(wire, GroupWire):
        arrived = _gathered(wire, tables, held, coords, why)
    else:
        arrived = _exchanged(wire, tables, held, why)
    return [unpack(buffer, x, table) for buffer, x, table in zip(arrived, held, tables, strict=True)]


def _gathered(
    wire: GroupWire, tables: Sequence[Transfer], held: Sequence[Tensor], coords: Coords, why: str
) -> list[Tensor]:
    """What every member's whole tensors are, one buffer per tensor."""
    own = wire.members.index(coords)
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

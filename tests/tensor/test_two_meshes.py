"""DTensors that go from one mesh to another: values, gradients, bytes, and what is refused."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw
from shardwright.comm import Recorder
from shardwright.comm.execute import execute
from shardwright.layout import MeshShape
from shardwright.plan import plan_redistribution
from tests.plan.kinds import small_integers
from tests.plan.two_meshes import random_pairs

R, S0, S1 = sw.Replicate(), sw.Shard(0), sw.Shard(1)


@functools.cache
def mesh_of(ranks: tuple[int, ...], sizes: tuple[int, ...], axes: tuple[str, ...]) -> DeviceMesh:
    """A mesh of some ranks of the world; all ranks make it, once per process."""
    return DeviceMesh("cpu", torch.tensor(ranks).view(sizes), mesh_dim_names=axes)


def trainer() -> DeviceMesh:
    return mesh_of((0, 1, 2, 3), (2, 2), ("dp", "tp"))


def inference() -> DeviceMesh:
    return mesh_of((3, 4, 5), (3,), ("tp",))


def own(x: sw.DTensor, full: torch.Tensor) -> torch.Tensor:
    """The part of the full tensor that belongs on this rank."""
    layout = x.layout
    return (
        layout.split(full, layout.coords_of(dist.get_rank()))
        if dist.get_rank() in layout.ranks
        else torch.empty(0)
    )


def random_moves(count: int) -> list[int]:
    """Bytes that this rank sent in each move."""
    rank, sent = dist.get_rank(), []
    for seed, (source, target) in enumerate(random_pairs(count, seed=7)):
        full = small_integers(source.shape, source.dtype, seed).sign() * 6
        mine = source.split(full, source.coords_of(rank)) if rank in source.ranks else full.new_empty(0)
        with Recorder() as seen:
            result = execute(plan_redistribution(source, target), mine, None)
        sent.append(seen.bytes)
        check_value(target, result, full)
    return sent


def check_value(layout: sw.Layout, local: torch.Tensor, full: torch.Tensor) -> None:
    if layout.pending_axes:
        everywhere = sw.Layout(MeshShape(("all",), (6,)), [R], layout.shape, dtype=layout.dtype)
        assert torch.equal(execute(plan_redistribution(layout, everywhere), local, None), full)
    elif dist.get_rank() in layout.ranks:
        assert torch.equal(local, layout.split(full, layout.coords_of(dist.get_rank())))


def test_random_moves_on_real_ranks_give_the_value_and_send_what_the_plan_states(ranks):
    sent = ranks(6, random_moves, 12)
    for of_ranks, (source, target) in zip(zip(*sent, strict=True), random_pairs(12, seed=7), strict=True):
        plan = plan_redistribution(source, target)
        assert sum(of_ranks) == plan.total_bytes, f"{plan}"
        assert list(of_ranks) == [plan.traffic.get(rank, (0, 0))[0] for rank in range(6)]


def there_and_back() -> dict[str, int]:
    """A value goes trainer -> inference, is used there, and its gradient comes back."""
    full = small_integers((8, 6), torch.float32)
    x = sw.distribute_tensor(full.clone().requires_grad_(), trainer(), [S0, S1], src_data_rank=None)
    with sw.trace() as there:
        y = x.redistribute(inference(), [S1])
    assert y.device_mesh == inference()
    assert tuple(y.shape) == (8, 6)
    assert torch.equal(y.to_local(), own(y, full))
    with sw.trace() as back:
        (y * y * y).sum().backward()
    assert x.grad.layout == x.layout
    assert torch.equal(x.grad.to_local(), own(x, 3 * full * full))
    return {"there": there.bytes, "back": back.bytes, "axis": {event.axis for event in there.collectives}}


def test_a_gradient_goes_back_to_the_mesh_where_the_value_came_from(ranks):
    seen = ranks(6, there_and_back)
    mesh = MeshShape(("dp", "tp"), (2, 2))
    source = sw.Layout(mesh, [S0, S1], (8, 6), dtype=torch.float32)
    target = sw.Layout(MeshShape(("tp",), (3,), (3, 4, 5)), [S1], (8, 6), dtype=torch.float32)
    assert sum(rank["there"] for rank in seen) == plan_redistribution(source, target).lower_bound
    assert sum(rank["back"] for rank in seen) == plan_redistribution(target, source).lower_bound
    assert seen[0]["axis"] == {"(dp, tp) -> (tp)"}

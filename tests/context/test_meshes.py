"""The five domains are views of one root mesh, and torch accepts them wherever it accepts its own."""

import itertools
import os
import socket

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardwright as sw
from shardwright.compat import root_mesh
from shardwright.compat.joined_meshes import union_mesh
from shardwright.context import (
    BATCH_DOMAIN,
    DENSE_DOMAIN,
    EXPERT_DOMAIN,
    FLAT_DOMAIN,
    REGULAR_DOMAIN,
    DeviceMeshParameters,
    register_domain,
    submesh,
)
from shardwright.errors import MeshError


def _coords(context):
    """Coordinates of this rank in every domain, counted as for a row-major grid."""
    return {
        name: dict(zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True))
        for name in context.domains
        for mesh in [context.mesh_for(name)]
    }


def _all_coords(parameters):
    context = parameters.build()
    return (
        {
            name: (context.mesh_for(name).mesh_dim_names, tuple(context.mesh_for(name).shape))
            for name in (REGULAR_DOMAIN, DENSE_DOMAIN, EXPERT_DOMAIN, BATCH_DOMAIN, FLAT_DOMAIN)
        },
        _coords(context),
        context.rank,
    )


def test_axes_and_coordinates_are_those_of_the_row_major_world(ranks):
    parameters = DeviceMeshParameters(
        data_parallel_replicate=2, context_parallel_shard=2, context_parallel_replicate=2, expert_parallel=4
    )
    results = ranks(8, _all_coords, parameters)
    assert results[0][0] == {
        REGULAR_DOMAIN: (
            ("pp", "dp_replicate", "dp_shard", "cp_shard", "cp_replicate", "tp"),
            (1, 2, 1, 2, 2, 1),
        ),
        DENSE_DOMAIN: (("pp", "dp_replicate", "dp_cp_shard", "cp_replicate", "tp"), (1, 2, 2, 2, 1)),
        EXPERT_DOMAIN: (("pp", "ep_replicate", "ep_shard", "tp"), (1, 2, 4, 1)),
        BATCH_DOMAIN: (("pp", "dp", "cp", "tp"), (1, 2, 4, 1)),
        FLAT_DOMAIN: (("world",), (8,)),
    }
    for (_, coords, rank), (a, b, c) in zip(results, itertools.product(range(2), repeat=3), strict=True):
        assert rank == 4 * a + 2 * b + c
        assert coords["dense"] == {"pp": 0, "dp_replicate": a, "dp_cp_shard": b, "cp_replicate": c, "tp": 0}
        assert coords["expert"] == {"pp": 0, "ep_replicate": a, "ep_shard": 2 * b + c, "tp": 0}
        assert coords["batch"] == {"pp": 0, "dp": a, "cp": 2 * b + c, "tp": 0}


def _slices():
    context = DeviceMeshParameters(
        data_parallel_replicate=2, data_parallel_shard=2, context_parallel_replicate=2, expert_parallel=2
    ).build()
    dense, expert = context.mesh_for(DENSE_DOMAIN), context.mesh_for(EXPERT_DOMAIN)
    slices = [
        dense[["dp_replicate", "cp_replicate"]],
        dense["cp_replicate"],
        dense[["dp_replicate", "dp_cp_shard"]],
        expert[["ep_replicate", "ep_shard"]],
        submesh(dense, ["tp", "dp_replicate"]),
    ]
    assert all(piece._get_root_mesh() == context.root_mesh for piece in slices)
    sums = []
    for mesh in slices:
        mine = DTensor.from_local(torch.tensor([float(context.rank)]), mesh, [Partial()] * mesh.ndim)
        sums.append(mine.full_tensor().item())
    return [piece.mesh_dim_names for piece in slices], sums


def test_slices_by_name_reduce_over_the_right_ranks(ranks):
    names, sums = ranks(8, _slices)[5]  # rank 5: dp_replicate 1, dp_cp_shard 0, cp_replicate 1
    assert names[0] == ("dp_replicate", "cp_replicate")
    assert names[4] == ("dp_replicate", "tp")
    assert sums == [0 + 1 + 4 + 5, 4 + 5, 1 + 3 + 5 + 7, 28, 1 + 5]


def _equal_axes_share_a_group():
    before = len(dist.distributed_c10d._world.pg_map)
    context = DeviceMeshParameters(data_parallel_shard=2, tensor_parallel=2).build()
    made = len(dist.distributed_c10d._world.pg_map) - before
    groups = [
        context.mesh_for(name).get_group("tp") for name in (REGULAR_DOMAIN, DENSE_DOMAIN, EXPERT_DOMAIN)
    ]
    with sw.trace() as t:
        dist.barrier(groups[0])
        dist.barrier(dist.new_subgroups(2)[0])
    return made, groups[0] is groups[1] is groups[2], [event.axis for event in t.collectives]


def test_equal_axes_of_two_domains_share_their_group(ranks):
    """One own group for tp, one for dp, one of this rank alone; the world's exists. A record names them."""
    pairs = ["ranks 0, 1"] * 2 + ["ranks 2, 3"] * 2
    assert ranks(4, _equal_axes_share_a_group, fresh=True) == [(3, True, ["tp", pair]) for pair in pairs]


def _fully_shard_on_views():
    context = DeviceMeshParameters(data_parallel_shard=2, tensor_parallel=2).build()
    dense = context.mesh_for(DENSE_DOMAIN)
    torch.manual_seed(0)
    linear = torch.nn.Linear(4, 6, bias=False)
    full = linear.weight.detach().clone()
    linear.weight = torch.nn.Parameter(distribute_tensor(linear.weight.detach(), dense["tp"], [Shard(0)]))
    fully_shard(linear, mesh=dense["dp_cp_shard"])
    concatenated = DeviceMesh._concatenate([dense["dp_cp_shard"], dense["tp"]])
    assert linear.weight.device_mesh == concatenated
    torch.testing.assert_close(linear.weight.full_tensor(), full)
    x = DTensor.from_local(torch.ones(3, 4), dense["tp"], [Replicate()])
    linear(x).sum().backward()
    return linear.weight.grad.full_tensor()


def test_fully_shard_recognises_the_root_of_two_views(ranks):
    for gradient in ranks(4, _fully_shard_on_views):
        torch.testing.assert_close(gradient, torch.full((6, 4), 3.0))


def _world_of_one():
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    with DeviceMeshParameters().build() as context:
        assert dist.get_world_size() == 1
        dense = context.mesh_for(DENSE_DOMAIN)[["dp_replicate", "cp_replicate"]]
        total = DTensor.from_local(torch.ones(2), dense, [Partial(), Partial()]).full_tensor()
        facts = (context.rank, context.local_rank, context.is_main, context.device.type, total.tolist())
        assert context.is_open
    return facts, dist.is_initialized(), context.is_open


def test_a_world_of_one_process_starts_and_ends_by_itself(ranks):
    assert ranks(1, _world_of_one, fresh=True) == [((0, 0, True, "cpu", [1.0, 1.0]), False, False)]


def _launched(port):
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    launch = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in launch.items()})
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    with DeviceMeshParameters(data_parallel_shard=world).build(timeout=20) as context:
        mesh = context.mesh_for(DENSE_DOMAIN)["dp_cp_shard"]
        total = DTensor.from_local(torch.ones(1), mesh, [Partial()]).full_tensor().item()
        facts = context.rank, context.local_rank, context.is_main, total
        dist.barrier()
    return facts, dist.is_initialized()


def test_the_ranks_of_a_launcher_are_taken_from_its_environment(ranks):
    """The variables are those of torchrun; the group ends with the context that made it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = ranks(2, _launched, port, fresh=True)
    assert results == [((0, 0, True, 2.0), False), ((1, 1, False, 2.0), False)]


def _attached_group_survives_close():
    DeviceMeshParameters(data_parallel_shard=2).build().close()
    dist.barrier()
    return dist.is_initialized()


def test_a_group_that_was_there_before_stays_after_close(ranks):
    assert ranks(2, _attached_group_survives_close) == [True, True]


def _message(call):
    with pytest.raises(MeshError) as caught:
        call()
    return str(caught.value)


def _refusals():
    context = DeviceMeshParameters(data_parallel_shard=2).build()
    dense = context.mesh_for(DENSE_DOMAIN)
    return [
        _message(lambda: context.mesh_for("dens")),
        _message(lambda: submesh(dense, "dp_shrd")),
        _message(lambda: submesh(dense, ["tp", "tp"])),
        _message(lambda: register_domain("dense", {"a": 2})),
        _message(lambda: register_domain("mine", {"a": 3})),
        _message(lambda: DeviceMeshParameters(data_parallel_shard=4).build()),
    ]


def test_unknown_names_and_wrong_sizes_are_refused_in_one_line(ranks):
    unknown, axis, twice, taken, size, world = ranks(2, _refusals)[0]
    assert unknown == (
        "unknown domain 'dens'; use one of regular, dense, expert, batch, flat, "
        "or register_domain('dens', axes)"
    )
    assert axis == (
        "unknown axis 'dp_shrd' of a mesh with axes (pp, dp_replicate, dp_cp_shard, cp_replicate, tp); "
        "did you mean 'dp_cp_shard'?"
    )
    assert twice == "axes (tp, tp) are empty or named twice; name each axis once"
    assert "'dense' is taken" in taken
    assert size == (
        "domain 'mine': (a=3) spans 3 ranks, but the world has 2; the sizes must multiply to the world"
    )
    assert world.startswith("data_parallel_shard=4 = 4 ranks, but the world has 2")


def _other_degrees():
    """One rank asks for another mesh than the others; afterwards all can build one."""
    other = {"tensor_parallel": 2} if dist.get_rank() else {"data_parallel_shard": 2}
    said = _message(lambda: DeviceMeshParameters(**other).build())
    return said, DeviceMeshParameters(tensor_parallel=2).build().mesh_for("dense")["tp"].size()


def test_ranks_that_build_other_meshes_are_told_so(ranks):
    one, two = ranks(2, _other_degrees, timeout=60)
    assert one == two
    assert one[0].startswith(
        "the ranks build other meshes: data_parallel_shard is 2 on rank 0 and 1 on rank 1"
    )
    assert one[1] == 2


def _user_domain():
    register_domain("rows", lambda p: {"row": p.data_parallel_shard, "col": p.tensor_parallel})
    context = DeviceMeshParameters(data_parallel_shard=2, tensor_parallel=2).build()
    register_domain("late", {"left": 4})
    context.add_domain("own", {"left": 2, "right": 2})
    assert context.mesh_for("own").shape == (2, 2)
    assert "spans 3 ranks, but the world has 4" in _message(lambda: context.add_domain("three", {"a": 3}))
    rows, late = context.mesh_for("rows"), context.mesh_for("late")
    assert rows["col"]._get_root_mesh() == context.root_mesh
    return tuple(rows.get_coordinate()), tuple(late.get_coordinate())


def test_domains_of_the_user_exist_before_and_after_the_build(ranks):
    assert ranks(4, _user_domain, fresh=True) == [((i // 2, i % 2), (i,)) for i in range(4)]


def _unfit_domain():
    register_domain("four", {"a": 4})
    context = DeviceMeshParameters(data_parallel_shard=2).build()
    return context.mesh_for(DENSE_DOMAIN).size(), _message(lambda: context.mesh_for("four"))


def test_a_domain_for_worlds_of_another_size_stops_only_who_asks_for_it(ranks):
    size, message = ranks(2, _unfit_domain, fresh=True)[1]
    assert size == 2
    assert "spans 4 ranks, but the world has 2" in message


def _joins(parameters, outermost_first):
    regular = parameters.build().mesh_for(REGULAR_DOMAIN)
    parts = [regular[name] for name in reversed(outermost_first)]
    joined = union_mesh(parts)
    assert joined == regular[outermost_first], joined
    assert union_mesh(parts) is joined  # strategies ask for each parameter
    named = init_device_mesh("cpu", tuple(regular[outermost_first].shape), mesh_dim_names=outermost_first)
    beside = union_mesh([named[name] for name in reversed(outermost_first)])
    assert beside == named
    assert root_mesh(beside) is named  # not of another root whose ranks are the same


@pytest.mark.parametrize("degree", ["context_parallel_shard", "tensor_parallel"])
def test_axes_of_one_rank_are_joined_where_a_slice_of_the_mesh_has_them(ranks, degree):
    """Else tensor and context parallelism leave a model on a mesh that no slice of the user's is."""
    ranks(2, _joins, DeviceMeshParameters(**{degree: 2}), ("cp_shard", "tp"))

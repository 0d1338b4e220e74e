"""Meshes that torch calls equal and that are not one: of other roots, made twice, made again later."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw
from shardwright.testing.meshes import rank_mesh

from .cases import close

_A, _B = torch.linspace(-3, 4, 24).view(4, 6), torch.linspace(2, -5, 24).view(4, 6)


def _made_of(x):
    """What an op, a reduction, a view and a move make of it."""
    return (
        x,
        x * 2,
        x.sum(),
        x[1:3],
        x @ x.t(),
        x.redistribute(placements=[sw.Replicate()] * x.device_mesh.ndim),
    )


def _of_two_roots():
    """`(pp, tp)["tp"]` and `(dp, tp)["tp"]`: a tensor leads back to its own, whichever was there first."""
    other = rank_mesh((2, 2), ("pp", "tp"))
    home = rank_mesh((2, 2), ("dp", "tp"))
    assert other["tp"] == home["tp"], "torch calls them equal, or there is nothing to see here"
    for root in (other, home, other):
        for placement in (sw.Shard(0), sw.Ragged((1, 2)), sw.Ragged((2, 1), (0, 1))):
            x = sw.distribute_tensor(_A, root["tp"], [placement])
            for made in _made_of(x):
                assert made.device_mesh._get_root_mesh() is root
            y = sw.distribute_tensor(_B, root, [sw.Shard(0), sw.Shard(1)])
            close(torch.stack([x.sum(), y.sum()]), torch.stack([_A.sum(), _B.sum()]))


def _of_ranks_in_another_order():
    """torch sorts the ranks of a group: a rank's place there is not its coord."""
    mesh = sw.DeviceMesh("cpu", [1, 0], mesh_dim_names=("back",))
    coord, rank = mesh.get_coordinate()[0], dist.get_rank()
    for source in (None, 0, 1):
        for placement in (sw.Shard(0), sw.Shard(1), sw.Ragged((1, 3)), sw.Replicate()):
            own = _A + rank * (source is not None)
            x = sw.distribute_tensor(own, mesh, [placement], src_data_rank=source)
            wanted = _A if source is None else _A + (1 - source)
            for made, value in zip(_made_of(x), _made_of_plain(wanted), strict=True):
                close(made, value)
    uneven = sw.local_map(lambda x: x[: 1 if coord else 2], out_placements=[sw.Shard(0)])
    close(uneven(sw.distribute_tensor(_A, mesh, [sw.Shard(0)])), _A[:3])


def _made_of_plain(x):
    return (x, x * 2, x.sum(), x[1:3], x @ x.t(), x)


def test_a_tensor_on_a_slice_leads_back_to_its_own_mesh(ranks):
    ranks(4, _of_two_roots)


def _made_twice():
    """Everything that is made of a tensor stays on its mesh object, also in a compiled graph."""
    first, second = (init_device_mesh("cpu", (2,), mesh_dim_names=("twice",)) for _ in range(2))
    assert first == second
    sw.distribute_tensor(_A, first, [sw.Replicate()])
    x, w = (
        sw.distribute_tensor(value, second, [cut])
        for value, cut in ((_A, sw.Shard(1)), (_A.t(), sw.Shard(0)))
    )
    for made in _made_of(x):
        assert made.device_mesh is second
    w.requires_grad_()
    graph = torch.compile(
        lambda x, w: (x @ w).redistribute(placements=[sw.Replicate()]).tanh(),
        backend="aot_eager",
        fullgraph=True,
    )
    y = graph(x, w)
    y.sum().backward()
    assert y.device_mesh is second
    assert w.grad.device_mesh is second
    plain = _A.t().clone().requires_grad_()
    (_A @ plain).tanh().sum().backward()
    close(w.grad, plain.grad)


def test_what_is_made_of_a_tensor_stays_on_its_mesh(ranks):
    ranks(2, _made_twice)


def _given_to_a_graph():
    """A slice that is not the object which stands for its equals, and a mesh that nobody used before."""
    root = rank_mesh((2, 1), ("tp", "rest"))
    sw.distribute_tensor(_A, root["tp"], [sw.Replicate()])
    unused = init_device_mesh("cpu", (2,), mesh_dim_names=("unused",))
    for mesh in (root["tp"], unused):
        x = _A.clone().requires_grad_()
        graph = torch.compile(
            lambda x, mesh=mesh: sw.DTensor.from_local(x, mesh, [sw.Replicate()]).sin(), backend="aot_eager"
        )
        y = graph(x)
        y.sum().backward()
        assert type(y.device_mesh) is sw.DeviceMesh
        assert y.device_mesh is mesh or mesh is not unused
        close(y, _A.sin())
        close(x.grad, _A.cos())


def test_a_graph_makes_tensors_on_the_mesh_that_it_is_given(ranks):
    ranks(2, _given_to_a_graph)


def _worlds(folder: str) -> None:
    """One process in three worlds, with another rank in each, and groups of other names."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    for turn in range(3):
        now = (rank + turn) % 2
        dist.init_process_group("gloo", init_method=f"file://{folder}/{turn}", rank=now, world_size=2)
        for _ in range(turn):
            dist.new_group([0, 1])
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for placement in (sw.Shard(0), sw.Ragged((1, 2)), sw.Owner(1)):
            x = sw.distribute_tensor(_A, mesh, [placement])
            assert x.device_mesh is mesh
            torch.testing.assert_close(
                (x * 2)[1:].redistribute({"tp": sw.Shard(1)}).full_tensor(), _A[1:] * 2
            )
            torch.testing.assert_close((x @ x.t()).full_tensor(), _A @ _A.t())
        dist.destroy_process_group()


def test_a_world_that_is_made_again_is_another(ranks, tmp_path):
    ranks(2, _worlds, str(tmp_path), fresh=True)


def test_a_mesh_has_its_ranks_in_its_own_order(ranks):
    ranks(2, _of_ranks_in_another_order)

"""`from_local` of a part that is like one before: the same tensor, gradients and errors as of the first."""

from __future__ import annotations

import pytest
import torch

import shardwright as sw
from shardwright.remember import forget
from shardwright.tensor import known_parts


def _mesh(*names):
    world = torch.distributed.get_world_size()
    return sw.init_device_mesh("cpu", (world,), mesh_dim_names=names or ("tp",))


def _rows(mesh):
    """This rank's rows of a whole, which every rank knows."""
    whole = torch.arange(24.0).reshape(4, 6)
    rows = 4 // mesh.size()
    return whole, whole[mesh.get_local_rank() * rows :][:rows].clone()


GIVEN = {
    "a list": lambda: [sw.Shard(0)],
    "a tuple": lambda: (sw.Shard(0),),
    "torch's": lambda: [torch.distributed.tensor.Shard(0)],
    "by name": lambda: {"tp": sw.Shard(0)},
    "from the end": lambda: [sw.Shard(-2)],
}


def _thrice():
    """Values, layouts and gradients of the first call and of those that know it."""
    mesh = _mesh()
    whole, rows = _rows(mesh)
    told = {}
    for name, given in GIVEN.items():
        forget()
        for _ in range(3):
            local = rows.clone().requires_grad_()
            x = sw.DTensor.from_local(local, mesh, given())
            weights = sw.distribute_tensor(whole, mesh, [sw.Replicate()])
            (x * weights).sum().backward()
            told.setdefault(name, []).append(
                (str(sw.layout_of(x)), torch.equal(x.full_tensor(), whole), torch.equal(local.grad, rows))
            )
    return told


def test_a_part_like_one_before_makes_the_same_whole(ranks):
    for told in ranks(2, _thrice):
        for name, calls in told.items():
            assert calls == [("f32[4@tp, 6]", True, True)] * 3, name


def _pending():
    """The gradient of a term is the gradient of the whole, on every rank."""
    mesh = _mesh()
    found = []
    for _ in range(3):
        local = torch.full((2,), 1.0 + mesh.get_local_rank(), requires_grad=True)
        x = sw.DTensor.from_local(local, mesh, [sw.Partial()])
        (x * x).sum().backward()
        found.append((x.full_tensor().tolist(), local.grad.tolist()))
    return found


def test_the_gradient_of_a_pending_part_is_that_of_the_sum(ranks):
    assert ranks(2, _pending) == [[([3.0, 3.0], [6.0, 6.0])] * 3] * 2


def _what_differs():
    """Each of these is another part: nothing is taken from the one before."""
    mesh = _mesh()
    told = []
    for local in (
        torch.ones(2, 6), torch.ones(6, 2).t(), torch.ones(2, 6, dtype=torch.float64), torch.ones(3, 6),
    ):  # fmt: skip
        for given in ([sw.Shard(0)], [sw.Shard(1)], [sw.Replicate()], [sw.Partial()]):
            x = sw.DTensor.from_local(local, mesh, given)
            forget()
            again = sw.DTensor.from_local(local, mesh, given)
            told.append(sw.layout_of(x) == sw.layout_of(again) and x.stride() == again.stride())
    return told


def test_shape_stride_dtype_and_placement_are_told_apart(ranks):
    for told in ranks(2, _what_differs):
        assert told == [True] * 16


def _written_through():
    """The part is shared with the program, as of the first call, and a pending one is in its hands."""
    mesh = _mesh()
    found = []
    for _ in range(2):
        local = torch.ones(2, 6)
        x = sw.DTensor.from_local(local, mesh, [sw.Partial()])
        with sw.spmd(mesh):
            before = torch.relu(x).full_tensor()
            local.mul_(3)
            after = torch.relu(x).full_tensor()
        found.append(torch.equal(after, before * 3))
    return found


def test_what_the_program_writes_into_its_part_is_seen(ranks):
    assert ranks(2, _written_through) == [[True, True]] * 2


def _errors():
    mesh, found = _mesh(), []
    for _ in range(2):
        for given in ([sw.Shard(5)], [sw.Shard(0), sw.Shard(0)], {"dp": sw.Shard(0)}, [Ellipsis], [[]]):
            try:
                sw.DTensor.from_local(torch.ones(2, 6), mesh, given)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the same again
                found.append((type(error).__name__, str(error)))
            else:
                found.append(("nothing", ""))
    return found[:5] == found[5:], [name for name, _ in found[:5]]


def test_what_is_refused_is_refused_each_time(ranks):
    for same, names in ranks(1, _errors):
        assert same
        assert "nothing" not in names


def _transforms():
    mesh = _mesh()
    _, rows = _rows(mesh)
    for _ in range(3):
        sw.DTensor.from_local(rows, mesh, [sw.Shard(0)])

    def loss(local):
        return (sw.DTensor.from_local(local, mesh, [sw.Shard(0)]) ** 2).sum().full_tensor()

    try:
        grad = torch.func.grad(loss)(rows)
    except RuntimeError as error:
        forget()
        with pytest.raises(RuntimeError, match=str(error).splitlines()[0][:30].replace("(", ".")):
            torch.func.grad(loss)(rows)
        return True
    return torch.equal(grad, 2 * rows)


def test_transforms_are_as_of_a_first_call(ranks):
    assert all(ranks(1, _transforms))


def _other_mesh():
    """Two meshes of the same ranks are two meshes."""
    local = torch.ones(2, 6)
    one, other = _mesh("tp"), _mesh("dp")
    made = [sw.DTensor.from_local(local, mesh, [sw.Shard(0)]) for mesh in (one, other) * 2]
    return [x.device_mesh.mesh_dim_names for x in made]


def test_each_mesh_has_parts_of_its_own(ranks):
    assert ranks(2, _other_mesh) == [[("tp",), ("dp",)] * 2] * 2


def _bounded():
    mesh = _mesh()
    for size in range(50):
        sw.DTensor.from_local(torch.ones(size + 1), mesh, [sw.Shard(0)])
    return len(known_parts.parts) >= 50


def test_parts_of_other_sizes_are_other_entries(ranks):
    assert all(ranks(1, _bounded))

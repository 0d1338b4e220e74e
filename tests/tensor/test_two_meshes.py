"""DTensors that go from one mesh to another: values, gradients, bytes, and what is refused."""

from __future__ import annotations

import functools
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

import shardwright as sw
from shardwright.comm import Recorder
from shardwright.comm.execute import execute
from shardwright.comm.guard import guarded
from shardwright.errors import LayoutError, PlanError, RuleError
from shardwright.layout import MeshShape
from shardwright.parallel import parallelize_fsdp
from shardwright.plan import plan_redistribution
from tests.plan.kinds import small_integers
from tests.plan.two_meshes import least_elements, random_pairs

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
    layout = sw.layout_of(x)
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


def dtypes() -> None:
    for dtype in (torch.bfloat16, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int64):
        full = torch.arange(42).remainder(5).to(dtype).view(7, 6)
        for target in ([sw.ZigZag(0)], [S1], [sw.Ragged((1, 2, 1), (0, 1))]):
            x = sw.distribute_tensor(full, trainer(), [S0, S1], src_data_rank=None)
            y = x.redistribute(inference(), target)
            assert torch.equal(y.to_local().view(torch.uint8), own(y, full).contiguous().view(torch.uint8))


def test_every_dtype_travels_bit_for_bit(ranks):
    ranks(6, dtypes)


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
    assert sw.layout_of(x.grad) == sw.layout_of(x)
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


# ------------------------------------------------------------------------------------ a model's whole state

KINDS = (S0, R, sw.Interleaved(0, 2), sw.Owner(1), sw.ZigZag(0), sw.BlockCyclic(0, 3), sw.Shard(-1))


def decoder() -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)
    return torch.nn.Sequential(torch.nn.Embedding(17, 12), torch.nn.TransformerEncoder(layer, 1)).double()


def chain() -> list[tuple[int, int]]:
    """4 -> 3 -> 4 -> 2 ranks. Returns: (bytes sent by this rank, batches of messages) per move."""
    meshes = [trainer(), inference(), mesh_of((5, 4, 1, 0), (4,), ("dp",)), mesh_of((2, 5), (2,), ("tp",))]
    full = {name: x.float() if "bias" in name else x for name, x in decoder().state_dict().items()}
    state = {
        name: sw.distribute_tensor(x, meshes[0], [KINDS[i % 7], S0], src_data_rank=None)
        for i, (name, x) in enumerate(full.items())
    }
    seen = []
    for turn, mesh in enumerate(meshes[1:], 1):
        targets = {name: [KINDS[(i + 3 * turn) % 7]] for i, name in enumerate(full)}
        with sw.trace() as trace:
            state = sw.redistribute_many(state, mesh, targets)
        assert list(state) == list(full)
        assert all(torch.equal(state[name].to_local(), own(state[name], x)) for name, x in full.items())
        seen.append((trace.bytes, len(trace.collectives)))
    return seen


def least_of_chain() -> list[int]:
    meshes = [
        MeshShape(("dp", "tp"), (2, 2)),
        MeshShape(("tp",), (3,), (3, 4, 5)),
        MeshShape(("dp",), (4,), (5, 4, 1, 0)),
        MeshShape(("tp",), (2,), (2, 5)),
    ]
    least = [0, 0, 0]
    for i, (name, x) in enumerate(decoder().state_dict().items()):
        placements = [[KINDS[i % 7], S0], *([KINDS[(i + 3 * turn) % 7]] for turn in (1, 2, 3))]
        layouts = [
            sw.Layout(mesh, p, x.shape, dtype=torch.float32 if "bias" in name else x.dtype)
            for mesh, p in zip(meshes, placements, strict=True)
        ]
        for move, pair in enumerate(pairwise(layouts)):
            least[move] += least_elements(*pair) * pair[0].itemsize
    return least


def test_a_models_state_goes_from_4_to_3_to_4_to_2_ranks_bit_for_bit_with_the_fewest_bytes(ranks):
    seen = ranks(6, chain)
    assert [sum(rank[move][0] for rank in seen) for move in range(3)] == least_of_chain()
    assert all(rank[move][1] <= 2 for rank in seen for move in range(3))  # one batch per dtype


# -------------------------------------------------------------------------------- what users expect of it


def trains_over_two_meshes() -> dict[str, torch.Tensor]:
    """A layer on one mesh, the next on another: this rank's part of both gradients."""
    torch.manual_seed(0)
    x, first, second = torch.randn(4, 6), torch.randn(6, 8), torch.randn(8, 2)
    place = functools.partial(sw.distribute_tensor, src_data_rank=None)
    a = place(first.clone().requires_grad_(), trainer(), {"tp": S1})
    b = place(second.clone().requires_grad_(), inference(), {"tp": S0})
    hidden = place(x, trainer(), {"dp": S0}) @ a
    out = hidden.relu().redistribute(inference(), {"tp": S1}) @ b
    out.square().sum().backward()
    first, second = first.requires_grad_(), second.requires_grad_()
    ((x @ first).relu() @ second).square().sum().backward()
    for mine, whole in ((a, first), (b, second)):
        grad = mine.grad.redistribute(placements=[p.dual() for p in mine.placements])
        torch.testing.assert_close(grad.to_local(), own(mine, whole.grad))


def test_a_model_that_spans_two_meshes_has_the_gradients_of_one_device(ranks):
    ranks(6, trains_over_two_meshes)


def pending_gradients() -> None:
    """The gradient of a replicated value that is used on other ranks comes back pending, as it is."""
    x = sw.distribute_tensor(torch.ones(4, 4).requires_grad_(), trainer(), [R, R], src_data_rank=None)
    mesh = mesh_of((3, 2, 1, 0), (4,), ("all",))
    with sw.trace() as trace:
        y = x.redistribute(mesh, [R])
        part = y.to_local(grad_placements=[sw.Partial()])
        (part.sum() * (dist.get_rank() + 1)).backward()
    assert trace.bytes == 0
    if dist.get_rank() < 4:
        assert x.grad.placements == (sw.Partial(), sw.Partial())
    assert x.grad.full_tensor().sum() in (0, 16 * 10)


def test_a_gradient_that_is_still_to_be_summed_is_not_summed_to_travel(ranks):
    ranks(6, pending_gradients)


def words() -> dict[str, object]:
    place = functools.partial(sw.distribute_tensor, src_data_rank=None)
    x = place(torch.arange(24.0).view(4, 6), trainer(), {"dp": S0, "tp": S1})
    kept = x.redistribute(inference(), {})  # `tp` keeps its placement, `dp` is gone
    cast = x.redistribute(inference(), [R], forward_dtype=torch.bfloat16)
    back = x.redistribute(inference(), [S0]).redistribute(trainer(), [S0, R])
    assert torch.equal(back.to_local(), own(back, torch.arange(24.0).view(4, 6)))
    again = sw.redistribute_many([x, x], inference(), [[S0], {"tp": R}])
    nobody = torch.empty(0)
    return {
        "kept": kept.placements,
        "cast": cast.dtype,
        "many": [y.placements for y in again],
        "full": tuple(kept.full_tensor().shape),
        "member": dist.get_rank() in sw.layout_of(kept).ranks,
        "outside": torch.equal(x.to_local(), nobody) and torch.equal(kept.to_local(), nobody),
    }


def test_placements_go_by_name_and_ranks_outside_hold_nothing(ranks):
    for rank, seen in enumerate(ranks(7, words)):
        assert seen["kept"] == (S1,)
        assert seen["cast"] == torch.bfloat16
        assert seen["many"] == [(S0,), (R,)]
        assert seen["full"] == ((4, 6) if seen["member"] else (0,))
        assert seen["outside"] == (rank == 6)


def gradients_of_any_kind() -> None:
    """Expanded gradients (of a sum), gradients of gradients, and those of lists."""
    full = small_integers((8, 6), torch.float32)
    for placement in (S0, R, sw.Ragged((1, 2, 3), (0, 1)), sw.Owner(1), sw.Partial()):
        x = sw.distribute_tensor(full.clone().requires_grad_(), trainer(), [S0, R], src_data_rank=None)
        y = x.redistribute(inference(), [placement], async_op=True)
        z = sw.redistribute_many([x], inference(), [placement])[0]
        (y.sum() + z.sum()).backward()
        assert torch.equal(x.grad.to_local(), own(x, torch.full((8, 6), 2.0)))
    (first,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first * first).sum(), x)
    assert second.full_tensor().equal(36 * full**3 if dist.get_rank() < 4 else torch.empty(0))


def test_gradients_of_sums_of_gradients_and_of_lists_go_back(ranks):
    ranks(6, gradients_of_any_kind)


def sharded_model() -> None:
    """The state of a module under FSDP; ranks that only answer have the same tensors, with nothing inside."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Linear(12, 8))
    full = {name: x.clone() for name, x in module.state_dict().items()}
    mesh = mesh_of((0, 1, 2, 3), (4,), ("dp",))
    if dist.get_rank() < 4:
        state = parallelize_fsdp(module, mesh).state_dict()
        state["0.bias"] = theirs(state["0.bias"])
    else:
        state = {name: sw.empty(x.shape, device_mesh=mesh, placements=[S0]) for name, x in full.items()}
    moved = sw.redistribute_many(state, inference(), [S0])
    assert all(torch.equal(moved[name].to_local(), own(moved[name], x)) for name, x in full.items())


def theirs(x: sw.DTensor) -> TorchDTensor:
    """The same tensor as torch's own class."""
    shape, stride = torch.Size(x.shape), sw.layout_of(x).stride
    return TorchDTensor.from_local(x.to_local(), x.device_mesh, x.placements, shape=shape, stride=stride)


def test_the_state_of_a_sharded_module_goes_to_ranks_that_never_had_it(ranks):
    ranks(6, sharded_model)


# ------------------------------------------------------------------------------------------------ refusals


def text_of(call, kind=LayoutError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def refused() -> dict[str, str]:
    place = functools.partial(sw.distribute_tensor, src_data_rank=None)
    x = place(torch.zeros(4, 6), trainer(), [S0, R])
    y = place(torch.zeros(4, 6), inference(), [R])
    gpus = DeviceMesh("cuda", [0, 1], _init_backend=False)
    far = DeviceMesh("cpu", [4, 5, 6], mesh_dim_names=("far",), _init_backend=False)
    with sw.trace() as trace:
        texts = {
            "device": text_of(lambda: x.redistribute(gpus, [R])),
            "slice": text_of(
                lambda: x.redistribute(mesh_of((0, 1, 2, 3, 4, 5), (3, 2), ("a", "b"))["b"], [R])
            ),
            "world": text_of(lambda: x.redistribute(far, [R]), PlanError),
            "count": text_of(lambda: x.redistribute(inference(), [R, R])),
            "axis": text_of(lambda: x.redistribute(inference(), {"dp": R})),
            "plain": text_of(lambda: sw.redistribute_many({"w": x, "b": torch.zeros(2)}, inference(), [R])),
            "name": text_of(lambda: sw.redistribute_many({"w": x, "b": x}, inference(), {"w": [R]})),
            "list": text_of(lambda: sw.redistribute_many([x], inference(), {"w": [R]})),
            "placements": text_of(lambda: sw.redistribute_many([x], inference())),
            "two": text_of(lambda: x + y, RuleError),
        }
    assert trace.bytes == 0
    return texts


def test_what_cannot_be_done_is_refused_before_anything_moves(ranks):
    texts = ranks(6, refused)[0]
    assert texts["device"] == (
        "f32[4@dp, 6] lives on a mesh of cpu devices and cannot be redistributed to one of cuda devices: "
        "copy it to the other device on its own mesh first"
    )
    assert texts["slice"] == (
        "f32[4@dp, 6] cannot go from a mesh of ranks [0, 1, 2, 3] to one of ranks [0, 1]: one of them is a "
        "slice of a larger mesh, so ranks disagree about who takes part; make both with DeviceMesh or "
        "init_device_mesh"
    )
    assert texts["world"] == (
        "Layout(f32[4@dp, 6] on MeshShape(dp=2, tp=2)) -> Layout(f32[4, 6] on MeshShape(far=3)): rank 6 is "
        "outside this world of 6 ranks; name ranks that were started"
    )
    assert texts["count"].startswith("2 placements for a mesh of 1 axes ('tp',)")
    assert texts["axis"] == "the mesh has no axis 'dp'; its axes are ('tp',)"
    assert texts["plain"] == (
        "redistribute_many: 'b' is a Tensor, not a DTensor: place it with sw.distribute_tensor first, "
        "or leave it out"
    )
    assert texts["name"] == "redistribute_many: 'b' has no placements"
    assert texts["list"] == "redistribute_many: placements by name are for a state dict, not for a list"
    assert texts["placements"].startswith("redistribute_many needs placements")
    assert "different meshes" in texts["two"]


def another_move() -> str:
    source = sw.Layout(trainer(), [S0, R], (4, 6), dtype=torch.float32)
    target = sw.Layout(inference(), [R if dist.get_rank() % 2 else S0], (4, 6), dtype=torch.float32)
    mine = torch.zeros(2, 6) if dist.get_rank() < 4 else torch.empty(0)
    with guarded():
        return text_of(lambda: execute(plan_redistribution(source, target), mine, None), PlanError)


def test_the_guard_finds_ranks_that_plan_another_move(ranks):
    for text in ranks(6, another_move):
        assert "about to run different redistributions" in text
        assert "f32[4@dp, 6] on ranks (0, 1, 2, 3) -> f32[4@tp, 6] on ranks (3, 4, 5)" in text


def in_a_graph() -> None:
    grid = trainer()
    x = sw.distribute_tensor(torch.arange(42.0).view(7, 6), grid, [S0, S1], src_data_rank=None)
    line = mesh_of((2, 0, 3), (3,), ("tp",))
    same = torch.compile(lambda a: a.redistribute(grid, [S1, S0]), backend="aot_eager", fullgraph=True)
    assert torch.equal(same(x).full_tensor(), torch.arange(42.0).view(7, 6))
    with pytest.raises(RuntimeError, match="a traced graph cannot hold messages between two meshes"):
        torch.compile(lambda a: a.redistribute(line, [S1]), backend="aot_eager", fullgraph=True)(x)


def test_a_compiled_graph_refuses_a_move_between_meshes(ranks):
    ranks(4, in_a_graph)

"""A block cut over tp inside a model that is replicated or sharded over data axes, against one device."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.errors import ParallelError
from shardwright.grads import GradientSynchronizer, clip_grad_norm_, global_mean
from shardwright.parallel import parallelize_fsdp, parallelize_replicate, parallelize_tensor
from shardwright.testing.meshes import rank_mesh
from tests.tiers import one_in

from .models import check_full_gradients, finish

DIM, UNEVEN, EVEN = 5, 7, 8  # torch's styles hand local tensors over, and cannot tell uneven lengths


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up = nn.Linear(DIM, hidden)
        self.down = nn.Linear(hidden, DIM)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.block = Block(hidden)
        self.head = nn.Linear(DIM, 3)

    def forward(self, x):
        return self.head(x + self.block(self.norm(x)))


PLAN = {"up.*": {"tp": sw.Shard(0)}, "down.weight": {"tp": sw.Shard(1)}}


def _enter(_module, inputs, mesh):
    return tuple(sw.DTensor.from_local(x, mesh, [sw.Replicate()]) for x in inputs)


def _leave(_module, out, mesh):
    return out.redistribute(mesh, [sw.Replicate()]).to_local()


def _by_placements(block, mesh):
    return sw.distribute_module(block, mesh, PLAN, _enter, _leave)


def _by_torchs_styles(block, mesh):
    return parallelize_tensor(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _by_torch_alone(block, mesh):
    return parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


TP = {"placements": _by_placements, "torch's styles": _by_torchs_styles, "torch alone": _by_torch_alone}
DATA = {
    "none": lambda model, _: model,
    "replicate": lambda model, mesh: parallelize_replicate(model, mesh["dp"]),
    "fsdp": lambda model, mesh: parallelize_fsdp(model, mesh["dp"]),
}


def _model(hidden=UNEVEN):
    torch.manual_seed(0)
    return Model(hidden)


def _step(tp, data, sizes, mode="plain"):
    mesh = rank_mesh(sizes, ("dp", "tp"))
    plain = _model(UNEVEN if tp == "placements" else EVEN)
    rows = 2 * sizes[0] - 1
    x = torch.randn(rows, DIM, generator=torch.Generator().manual_seed(2))
    one = copy.deepcopy(plain)
    one(x).pow(2).mean().backward()
    wanted = {n: p.grad for n, p in one.named_parameters()}
    TP[tp](plain.block, mesh["tp"])
    model = DATA[data](plain, mesh)
    if data == "none":
        parallelize_replicate(model, mesh["dp"])
    mine = x.split([2] * (sizes[0] - 1) + [1])[mesh.get_local_rank("dp")]

    def backward():
        out = model(mine) if mode == "plain" else checkpoint(model, mine, use_reentrant=False)
        assert type(out) is torch.Tensor
        global_mean(out.pow(2).sum(), out.numel(), mesh["dp"]).backward()

    backward()
    check_full_gradients(model, wanted)
    backward()
    finish(model)
    check_full_gradients(model, wanted, scale=2)
    model.zero_grad()
    backward()
    GradientSynchronizer(model).synchronize()
    check_full_gradients(model, wanted)
    norm = clip_grad_norm_(model.parameters(), 1e9)
    torch.testing.assert_close(
        norm, torch.linalg.vector_norm(torch.cat([g.flatten() for g in wanted.values()]))
    )
    ours, theirs = (torch.optim.AdamW(m.parameters(), 0.01) for m in (model, one))
    ours.step()
    theirs.step()
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q.detach(), rtol=1e-4, atol=1e-4)
    return {n: str(sw.layout_of(p)) for n, p in model.named_parameters()}


@pytest.mark.parametrize(("tp", "data"), one_in(3, itertools.product(TP, ["replicate", "fsdp"])))
def test_gradients_and_a_step_are_those_of_one_device(ranks, tp, data):
    ranks(4, _step, tp, data, (2, 2))


def test_uneven_rows_are_cut_by_tp_first_and_then_by_dp(ranks):
    """7 rows, tp 2, dp 3: tp ranks hold 4 and 3 rows, of which dp ranks hold 2, 2, 0 and 1, 1, 1."""
    layouts = ranks(6, _step, "placements", "fsdp", (3, 2))[0]
    assert layouts["block.up.weight"] == "f32[7@(tp, dp), 5]"
    assert layouts["block.down.weight"] == "f32[5@dp, 7@tp]"
    assert layouts["head.weight"] == "f32[3@dp, 5]"


def _rows_of_each_rank():
    mesh = rank_mesh((3, 2), ("dp", "tp"))
    model = _model()
    full = model.block.up.weight.detach().clone()
    _by_placements(model.block, mesh["tp"])
    parallelize_fsdp(model, mesh["dp"])
    weight = model.block.up.weight
    assert torch.equal(weight.full_tensor(), full)
    return len(weight.to_local())


def test_the_rows_of_each_rank_are_those_that_the_order_says(ranks):
    assert ranks(6, _rows_of_each_rank) == [2, 1, 2, 1, 0, 1]


def test_activation_checkpointing_recomputes_through_the_cut_block(ranks):
    ranks(4, _step, "placements", "replicate", (2, 2), "checkpoint")


def _tp_alone():
    mesh = rank_mesh((2,), ("tp",))
    plain = _model()
    x = torch.randn(3, DIM)
    one = copy.deepcopy(plain)
    one(x).sum().backward()
    parallelize_tensor(plain.block, mesh, PLAN | {"down.bias": {}})
    with sw.spmd(mesh):
        out = plain(x)
        assert torch.allclose(out.full_tensor() if isinstance(out, sw.DTensor) else out, one(x))
        out.sum().backward()
    for n, p in plain.block.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), one.get_parameter(f"block.{n}").grad)
    for n in ("head.weight", "norm.bias"):
        assert type(plain.get_parameter(n).grad) is torch.Tensor
        torch.testing.assert_close(plain.get_parameter(n).grad, one.get_parameter(n).grad)


def test_a_plain_model_around_a_cut_block_runs_in_an_spmd_block(ranks):
    ranks(2, _tp_alone)


def _refusals():
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    texts = []
    for plan in (
        {},
        {"up": ColwiseParallel(), "down.weight": {"tp": sw.Shard(1)}},
        {"upp.weight": {"tp": sw.Shard(0)}},
    ):
        model = _model()
        before = {n: id(p) for n, p in model.named_parameters()}
        with pytest.raises(ParallelError) as caught:
            parallelize_tensor(model.block, mesh["tp"], plan)
        texts.append(str(caught.value))
        assert {n: id(p) for n, p in model.named_parameters()} == before
    with pytest.raises(ParallelError, match="takes one axis") as caught:
        parallelize_tensor(_model(), mesh, PLAN)
    return [*texts, str(caught.value)]


def test_bad_plans_are_refused_with_the_module_unchanged(ranks):
    empty, mixed, unknown, axes = ranks(4, _refusals)[0]
    assert empty == mixed
    assert "at least one and not both" in empty
    assert unknown.startswith(
        "no parameter or buffer is named 'upp.weight'; the module has up.weight, up.bias"
    )
    assert axes == "parallelize_tensor takes one axis, got ('dp', 'tp'); slice the mesh: mesh['tp']"


SOURCES = {
    "words": {"up": "colwise", "down": "rowwise"},
    "placements": PLAN,
    "styles": {"up": ColwiseParallel(), "down": RowwiseParallel()},
}


def _values_of(plan, source):
    """Every rank has values of its own; those of the source count, or each rank's."""
    mesh = rank_mesh((2,), ("tp",))
    made = []
    for rank in range(2):
        made.append(_model().block)
        torch._foreach_add_([p.detach() for p in made[rank].parameters()], float(rank))
    mine = made[mesh.get_local_rank()]
    before = dict(mine.named_parameters())
    with pytest.raises(sw.errors.LayoutError, match="src_data_rank is 2"):
        parallelize_tensor(mine, mesh, plan, src_data_rank=2)
    assert dict(mine.named_parameters()) == before
    parallelize_tensor(mine, mesh, plan, src_data_rank=source)
    other = made[mesh.get_local_rank() if source is None else source]
    for name, p in mine.named_parameters():
        want = other.get_parameter(name) if mine is not other else before[name]
        part = p.to_local() if isinstance(p, sw.DTensor) else p
        layout = sw.layout_of(p)
        torch.testing.assert_close(part, layout.split(want.detach(), tuple(mesh.get_coordinate())), msg=name)


@pytest.mark.parametrize("source", [0, 1, None])
@pytest.mark.parametrize("plan", SOURCES)
def test_the_values_of_the_source_count(ranks, plan, source):
    ranks(2, _values_of, SOURCES[plan], source)


def _one_tp_rank_sees_another_batch():
    """A fault: tp ranks must see the same rows; the sum is then another one."""
    mesh = rank_mesh((2,), ("tp",))
    plain = _model()
    x = torch.randn(3, DIM)
    one = copy.deepcopy(plain)
    one(x).sum().backward()
    _by_placements(plain.block, mesh)
    plain.block(x + dist.get_rank()).sum().backward()
    return torch.allclose(plain.block.up.weight.grad.full_tensor(), one.block.up.weight.grad)


def test_a_different_batch_on_a_tp_rank_goes_red(ranks):
    assert ranks(2, _one_tp_rank_sees_another_batch) == [False, False]

"""Experts beside dense parameters: one device's gradients in every order of calls, some without tokens."""

import copy
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.context import DeviceMeshParameters
from shardwright.errors import ParallelError
from shardwright.grads import GradientSynchronizer, clip_grad_norm_, global_mean
from shardwright.moe import MoELayer
from shardwright.parallel import (
    ShardMoESparseExpertsParallel,
    parallelize_expert_parallel,
    parallelize_fsdp,
    parallelize_replicate,
)
from tests.tiers import one_in

from .models import check_full_gradients

DIM = 8


class MoEModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.moe = MoELayer(DIM, 12, 4, 2, shared_expert_dim=5)
        self.norm = nn.LayerNorm(DIM)
        self.second = MoELayer(DIM, 6, 4, 1)
        self.outer = nn.Linear(DIM, 3)

    def forward(self, x):
        h = self.inner(x)
        h = h + self.moe(self.norm(h))
        return self.outer(h + self.second(h))


def _model():
    torch.manual_seed(0)
    return MoEModel()


def _tokens(count):
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(3))


def _loss(model, x, mesh=None):
    total = model(x).pow(2).sum()
    return total / max(1, 3 * len(x)) if mesh is None else global_mean(total, 3 * len(x), mesh)


@functools.cache
def _context(ep, replicate=1, context=1):
    world = dist.get_world_size()
    return DeviceMeshParameters(
        data_parallel_replicate=replicate,
        data_parallel_shard=world // replicate // context,
        context_parallel_replicate=context,
        expert_parallel=ep,
    ).build()


def _experts(model, ctx):
    expert_mesh = ctx.mesh_for("expert")
    return parallelize_expert_parallel(
        model, mesh_experts=expert_mesh[["ep_replicate", "ep_shard"]], expert_shard_dim="ep_shard"
    )


def _dense(model, ctx, kind):
    dense_mesh = ctx.mesh_for("dense")
    if kind == "replicate":
        return parallelize_replicate(model, dense_mesh["dp_replicate", "dp_cp_shard", "cp_replicate"])
    parallelize_replicate(model, mesh=dense_mesh["cp_replicate"])
    return parallelize_fsdp(model, mesh=dense_mesh[["dp_replicate", "dp_cp_shard"]])


ORDERS = {
    "experts, then replicate": ("experts", "replicate"),
    "replicate, then experts": ("replicate", "experts"),
    "experts, then replicate and fsdp": ("experts", "fsdp"),
}


def _place(model, ctx, order):
    for kind in ORDERS[order]:
        if kind == "experts":
            _experts(model, ctx)
        else:
            _dense(model, ctx, kind)
    return model


def _step(order, ep, counts, replicate=1, context=1, mode="plain"):
    plain = _model()
    x = _tokens(sum(counts))
    one = copy.deepcopy(plain)
    _loss(one, x).backward()
    wanted = {name: p.grad for name, p in one.named_parameters()}
    ctx = _context(ep, replicate, context)
    model = _place(plain, ctx, order)
    mine = x.split(counts)[dist.get_rank()]
    mesh = ctx.mesh_for("batch")["dp", "cp"]
    sync = GradientSynchronizer(model)

    def backward():
        if mode == "plain":
            return _loss(model, mine, mesh).backward()
        out = checkpoint(model, mine, use_reentrant=False)
        return global_mean(out.pow(2).sum(), 3 * len(mine), mesh).backward()

    backward()
    check_full_gradients(model, wanted)
    labels = {n: str(sw.layout_of(p.grad)) for n, p in model.named_parameters()}
    sync.synchronize()
    check_full_gradients(model, wanted)
    assert all(sw.layout_of(p.grad).placements == sw.layout_of(p).placements for p in model.parameters())
    backward()
    check_full_gradients(model, wanted, scale=2)
    sync.synchronize()
    check_full_gradients(model, wanted, scale=2)
    norm = clip_grad_norm_(model.parameters(), 0.1)
    total = 2 * torch.linalg.vector_norm(torch.cat([g.flatten() for g in wanted.values()]))
    torch.testing.assert_close(norm, total)
    return labels


@pytest.mark.parametrize(
    ("order", "ep", "counts"),
    one_in(4, itertools.product(ORDERS, (2, 4), [(6, 6, 6, 6), (5, 0, 9, 1), (0, 0, 7, 0)]), first=1),
)
def test_gradients_and_their_norm_are_those_of_one_device(ranks, order, ep, counts):
    ranks(4, _step, order, ep, counts)


@pytest.mark.parametrize("order", ORDERS)
def test_experts_beside_two_replicated_axes(ranks, order):
    labels = ranks(4, _step, order, 2, (2, 3, 0, 4), replicate=2)[0]
    assert labels["moe.experts.gate.weight"] == "f32[4@ep_shard, 8, 12] {ep_replicate: Partial(sum)}"


def test_experts_beside_context_ranks(ranks):
    ranks(4, _step, "experts, then replicate and fsdp", 4, (2, 3, 0, 4), context=2)


def test_experts_and_activation_checkpointing(ranks):
    ranks(4, _step, "experts, then replicate", 4, (5, 0, 9, 1), mode="checkpoint")


def _all_tokens_to_one_expert():
    """Experts without a token have a zero gradient, everywhere, and nobody hangs."""
    plain = _model()
    with torch.no_grad():
        plain.moe.router.weight.zero_()[1] = 5.0
    model = _place(plain, _context(2), "experts, then replicate")
    x = torch.rand(3, DIM)
    _loss(model, x, _context(2).mesh_for("batch")["dp", "cp"]).backward()
    GradientSynchronizer(model).synchronize()
    grad = model.moe.experts.down.weight.grad.full_tensor()
    return grad.flatten(1).abs().sum(1) > 0


def test_experts_without_tokens_have_zero_gradients(ranks):
    got = ranks(2, _all_tokens_to_one_expert, timeout=20)
    assert all(used[1] for used in got)
    assert not all(got[0].tolist())


def _layouts():
    model = _place(_model(), _context(2, replicate=2), "experts, then replicate and fsdp")
    return {n: str(sw.layout_of(p)) for n, p in model.named_parameters()}


def test_the_dense_strategy_leaves_experts_alone(ranks):
    layouts = ranks(4, _layouts)[3]
    assert layouts["moe.experts.up.weight"] == "f32[4@ep_shard, 8, 12]"
    assert layouts["inner.weight"].startswith("f32[8@dp_cp_shard, 8]")
    assert layouts["moe.shared_expert.gate.weight"].startswith("f32[5@dp_cp_shard, 8]")


def _state_of(model):
    return {n: (id(p), type(p)) for n, p in model.named_parameters()}


def _refusals():
    texts = {}
    mesh = _context(2).mesh_for("expert")["ep_replicate", "ep_shard"]
    model = _model()

    def refuse(name, call):
        before = _state_of(model)
        with pytest.raises(ParallelError) as caught:
            call()
        assert _state_of(model) == before, name
        assert model.moe.communicator is None or name == "twice"
        texts[name] = str(caught.value)

    refuse("no axis", lambda: parallelize_expert_parallel(model, mesh, "ep"))
    refuse("no layer", lambda: parallelize_expert_parallel(model.inner, mesh))
    refuse("no MoELayer", lambda: parallelize_module(model, mesh, {"inner": ShardMoESparseExpertsParallel()}))
    model.second = MoELayer(DIM, 6, 3, 1)
    refuse("does not divide", lambda: parallelize_expert_parallel(model, mesh))
    model.second = nn.Identity()
    parallelize_fsdp(model, _context(2).mesh_for("dense")["dp_cp_shard"])
    refuse("sharded already", lambda: parallelize_expert_parallel(model, mesh))
    model = _model()
    parallelize_expert_parallel(model, mesh)
    refuse("twice", lambda: parallelize_expert_parallel(model, mesh))
    return texts


def test_what_cannot_be_spread_is_refused_with_the_model_unchanged(ranks):
    texts = ranks(4, _refusals)[0]
    assert texts["no axis"] == (
        "expert parallelism: the mesh has no axis 'ep'; its axes are ('ep_replicate', 'ep_shard')"
    )
    assert texts["does not divide"] == (
        "expert parallelism: 3 experts do not divide by ep_shard of size 2; "
        "choose a size that divides the number of experts"
    )
    assert "Linear is no MoELayer" in texts["no MoELayer"]
    assert "apply parallelize_expert_parallel before" in texts["sharded already"]
    assert "apply it once" in texts["twice"]


def _through_parallelize_module():
    """The style, as users of torch's parallelize_module apply it."""
    plain = _model()
    x = _tokens(6)
    one = copy.deepcopy(plain)
    _loss(one, x).backward()
    ctx = _context(2)
    style = ShardMoESparseExpertsParallel(shard_dim_name="ep_shard")
    mesh = ctx.mesh_for("expert")["ep_replicate", "ep_shard"]
    parallelize_module(plain, mesh, {"moe": style, "second": style})
    model = _dense(plain, ctx, "replicate")
    _loss(model, x.split((4, 2))[dist.get_rank()], ctx.mesh_for("batch")["dp", "cp"]).backward()
    check_full_gradients(model, {name: p.grad for name, p in one.named_parameters()})


def test_the_style_works_through_torchs_parallelize_module(ranks):
    ranks(2, _through_parallelize_module)


def _by_factor(parameters_of, factor):
    """A fault: the experts' gradients (or all) times a factor, as a wrong sum gives."""
    counts = (3, 3)
    plain, x = _model(), _tokens(6)
    one = copy.deepcopy(plain)
    _loss(one, x).backward()
    wanted = {name: p.grad for name, p in one.named_parameters()}
    ctx = _context(2)
    model = _place(plain, ctx, "experts, then replicate")
    _loss(model, x.split(counts)[dist.get_rank()], ctx.mesh_for("batch")["dp", "cp"]).backward()
    for name, p in model.named_parameters():
        if parameters_of in name:
            p.grad.to_local().mul_(factor)
    with pytest.raises(AssertionError, match="not close"):
        check_full_gradients(model, wanted)


@pytest.mark.parametrize(("parameters_of", "factor"), [("experts", 2.0), ("", 0.5), ("router", 2.0)])
def test_planted_factors_go_red(ranks, parameters_of, factor):
    ranks(2, _by_factor, parameters_of, factor)

"""`ToLocalParallel` and refusals: what a style or a strategy takes, and what it says to the rest."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwright as sw
from shardwright.compat.fully_shard.parameters import groups_of
from shardwright.context import DeviceMeshParameters
from shardwright.errors import ParallelError
from shardwright.grads import GradientSynchronizer
from shardwright.parallel import (
    ToLocalParallel,
    logical_dropout,
    parallelize_expert_parallel,
    parallelize_fsdp,
    parallelize_hsdp,
    parallelize_pipeline,
    parallelize_replicate,
)
from shardwright.parallel.expert import check_layer
from shardwright.testing.meshes import rank_mesh

from .models import (
    check_full_gradients,
    check_pending,
    one_device_gradients,
    part_of,
    sum_loss,
    token_batch,
    tricky,
)


def _to_local(param, grad, sizes=(2,), axes=("dp",)):
    plain = tricky()
    world = dist.get_world_size()
    batch = token_batch(2 * world - 1)
    wanted = one_device_gradients(plain, batch)
    counts = [2] * (world - 1) + [1]
    mesh = rank_mesh(sizes, axes)
    style = ToLocalParallel(param, grad)
    model = parallelize_module(plain, mesh, style)
    assert model is plain
    sum_loss(model, part_of(batch, counts, dist.get_rank()), batch[0].numel()).backward()
    check_pending(model, axes)
    check_full_gradients(model, wanted)
    GradientSynchronizer(model).synchronize()
    check_full_gradients(model, wanted)


def test_replicated_parameters_with_pending_gradients(ranks):
    ranks(2, _to_local, sw.Replicate(), sw.Partial("sum"))


def test_one_placement_per_axis(ranks):
    args = ((sw.Replicate(), sw.Replicate()), (sw.Partial("sum"), sw.Partial("sum")))
    ranks(4, _to_local, *args, (2, 2), ("dp_replicate", "cp_replicate"))


def _same_batch_everywhere():
    """Ranks that compute the same: the gradient is finished, and said to be."""
    plain = tricky()
    batch = token_batch(2)
    wanted = one_device_gradients(plain, batch)
    model = parallelize_module(
        plain, rank_mesh((2,), ("tp",)), ToLocalParallel(sw.Replicate(), sw.Replicate())
    )
    sum_loss(model, batch, batch[0].numel()).backward()
    check_pending(model, ())
    check_full_gradients(model, wanted)


def test_replicated_gradients_where_ranks_compute_the_same(ranks):
    ranks(2, _same_batch_everywhere)


class _Rows(nn.Module):
    """Each rank applies the rows that it holds to its own input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(15.0).reshape(5, 3))

    def forward(self, x):
        return self.weight * x


def _cut_parameter():
    mesh = rank_mesh((2,), ("ep",))
    module = parallelize_module(_Rows(), mesh, ToLocalParallel(sw.Shard(0), sw.Shard(0)))
    rank = dist.get_rank()
    out = module(torch.full((3,), 2.0 + rank))
    full = torch.arange(15.0).reshape(5, 3)
    assert torch.equal(out, full.split((3, 2))[rank] * (2 + rank))
    out.sum().backward()
    expected = torch.cat([torch.full((3, 3), 2.0), torch.full((2, 3), 3.0)])
    assert torch.equal(module.weight.grad.full_tensor(), expected)
    return str(sw.layout_of(module.weight.grad))


def test_a_cut_parameter_computes_as_its_part(ranks):
    assert ranks(2, _cut_parameter)[0] == "f32[5@ep, 3]"


def _beside_torchs_styles():
    """In one plan with torch's own styles."""
    mesh = rank_mesh((2,), ("tp",))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    one = copy.deepcopy(plain)
    x = torch.randn(3, 4)
    one(x).sum().backward()
    plan = {
        "0": ToLocalParallel(sw.Replicate(), sw.Replicate()),
        "1": ColwiseParallel(),
        "3": RowwiseParallel(),
    }
    model = parallelize_module(plain, mesh, plan)
    out = model(x)
    torch.testing.assert_close(out, one(x))
    out.sum().backward()
    check_full_gradients(model, {n: p.grad for n, p in one.named_parameters()})


def test_it_stands_in_one_plan_with_torchs_styles(ranks):
    ranks(2, _beside_torchs_styles)


def _refused(call, model):
    before = {n: id(p) for n, p in model.named_parameters()}
    with pytest.raises(ParallelError) as caught:
        call()
    assert {n: id(p) for n, p in model.named_parameters()} == before
    return str(caught.value)


def _refusals():
    mesh = rank_mesh((2, 1), ("dp", "tp"))
    model = tricky()
    no_names = sw.DeviceMesh("cpu", [[0], [1]])
    given = {
        "style": lambda: ToLocalParallel(sw.Replicate(), sw.Shard(0))._apply(model, mesh["dp"]),
        "count": lambda: ToLocalParallel([sw.Replicate()], sw.Partial())._apply(model, mesh),
        "axes": lambda: parallelize_fsdp(model, rank_mesh((2, 1, 1), ("dp", "cp", "tp"))),
        "unnamed": lambda: parallelize_replicate(model, no_names),
        "hsdp": lambda: parallelize_hsdp(model, mesh, shard_dim="dp_shard"),
        "hsdp default": lambda: parallelize_hsdp(model, mesh),
    }
    return {name: _refused(call, model) for name, call in given.items()}


def test_what_a_strategy_cannot_take_is_refused_with_the_module_unchanged(ranks):
    texts = ranks(2, _refusals)[0]
    assert texts["style"] == (
        "ToLocalParallel: axis 'dp': a local gradient of placement Shard(dim=0) cannot belong to a "
        "parameter of placement Replicate(): use Partial('sum') or Replicate() for a replicated one, "
        "its own placement for a cut one"
    )
    assert texts["count"] == "ToLocalParallel: 1 entries of param_placement for a mesh with axes ('dp', 'tp')"
    assert texts["axes"] == (
        "parallelize_fsdp takes one or two axes, got ('dp', 'cp', 'tp'); "
        "place 'cp' with parallelize_replicate first"
    )
    assert texts["unnamed"] == (
        "parallelize_replicate needs a mesh with axis names; make it with mesh_dim_names=(...)"
    )
    assert texts["hsdp"] == "parallelize_hsdp: the mesh has no axis 'dp_shard'; its axes are ('dp', 'tp')"
    assert "'dp_cp_shard'" in texts["hsdp default"]


def _in_another_order():
    """Also on the ranks whose own slice ascends."""
    mesh = sw.DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "tp"))
    model = tricky()
    given = {
        "parallelize_fsdp": lambda: parallelize_fsdp(model, mesh["tp"]),
        "parallelize_hsdp": lambda: parallelize_hsdp(model, mesh, shard_dim="tp"),
        "logical_dropout": lambda: logical_dropout(model, mesh["tp"]),
        "parallelize_pipeline": lambda: parallelize_pipeline(model, mesh["tp"], ["norm"]),
        "expert parallelism": lambda: check_layer(model, mesh, "tp"),
    }
    return {name: _refused(call, model) for name, call in given.items()}


def test_an_axis_whose_ranks_do_not_ascend_is_refused_where_places_in_its_group_count(ranks):
    """torch sorts the ranks of a group: the part of one rank would be taken for that of another."""
    for texts in ranks(4, _in_another_order):
        for name, text in texts.items():
            assert "the ranks of axis 'tp' do not ascend in [[3, 1], [0, 2]]" in text, name


def _without_names(place):
    model = place(tricky(), mesh := sw.DeviceMesh("cpu", [0, 1]))
    batch = token_batch(2)
    sum_loss(model, part_of(batch, (1, 1), dist.get_rank()), batch[0].numel()).backward()
    GradientSynchronizer(model).synchronize()
    check_full_gradients(model, one_device_gradients(tricky(), batch))
    for again, why in ((mesh, "places this"), (rank_mesh((2,), ("dp",)), "slice both from one mesh")):
        assert why in _refused(lambda again=again: parallelize_replicate(model, again), model)


@pytest.mark.parametrize("place", [parallelize_replicate, parallelize_fsdp])
def test_a_mesh_of_one_axis_needs_no_name(ranks, place):
    """On ranks of its own: on all meshes without names the axis is known from now on to be one of data."""
    ranks(2, _without_names, place, fresh=True)


def _twice(first, second):
    strategies = {"replicate": parallelize_replicate, "fsdp": parallelize_fsdp}
    mesh = rank_mesh((2,), ("dp",))
    model = strategies[first](tricky(), mesh)
    text = _refused(lambda: strategies[second](model, mesh), model)
    batch = token_batch(2)
    sum_loss(model, part_of(batch, (1, 1), dist.get_rank()), batch[0].numel()).backward()
    check_full_gradients(model, one_device_gradients(tricky(), batch))
    return text


@pytest.mark.parametrize(
    ("first", "second"),
    [("replicate", "replicate"), ("replicate", "fsdp"), ("fsdp", "replicate"), ("fsdp", "fsdp")],
)
def test_an_axis_places_a_parameter_once(ranks, first, second):
    text = ranks(2, _twice, first, second)[0]
    assert "axis 'dp' places this" in text
    assert "apply a strategy once per parameter and axis" in text


def _hsdp_half_way():
    """The shard axis places one parameter already: nothing is replicated either."""
    mesh = rank_mesh((1, 2), ("dp_replicate", "dp_cp_shard"))
    model = tricky()
    parallelize_replicate(model.norm, mesh["dp_cp_shard"])
    return _refused(lambda: parallelize_hsdp(model, mesh), model)


def test_hsdp_that_fails_half_way_leaves_the_module_as_it_was(ranks):
    assert "dp_cp_shard" in ranks(2, _hsdp_half_way)[0]


def _as_written():
    """The calls as the documents write them."""
    ctx = DeviceMeshParameters(
        data_parallel_replicate=2, context_parallel_replicate=1, data_parallel_shard=2, expert_parallel=2
    ).build()
    dense_mesh, expert_mesh = ctx.mesh_for("dense"), ctx.mesh_for("expert")
    model = tricky()
    parallelize_replicate(model, dense_mesh[["dp_replicate", "cp_replicate"]])
    model = nn.Sequential(sw_moe())
    parallelize_expert_parallel(
        model, mesh_experts=expert_mesh[["ep_replicate", "ep_shard"]], expert_shard_dim="ep_shard"
    )
    model = tricky()
    parallelize_replicate(model, mesh=dense_mesh["cp_replicate"])
    parallelize_fsdp(model, mesh=dense_mesh[["dp_replicate", "dp_cp_shard"]])
    return {n: str(sw.layout_of(p)) for n, p in model.named_parameters()}


def sw_moe():
    from shardwright.moe import MoELayer

    return MoELayer(8, 4, 4, 2)


def test_the_documented_calls_run_as_written(ranks):
    layouts = ranks(4, _as_written)[0]
    assert layouts["first.weight"] == "f32[6@dp_cp_shard, 6]"


def _options():
    """`fully_shard`'s own arguments pass through."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mesh = rank_mesh((2,), ("dp",))
    batch = token_batch(2)
    wanted = one_device_gradients(tricky(), batch)
    local = part_of(batch, (1, 1), dist.get_rank())
    kept = tricky()
    ignored = kept.first.weight
    model = parallelize_fsdp(kept, mesh, ignored_params={ignored}, reshard_after_forward=False)
    assert model.first.weight is ignored
    sum_loss(model, local, 8).backward()
    assert type(ignored.grad) is torch.Tensor
    torch.testing.assert_close(model.norm.weight.grad.full_tensor(), wanted["norm.weight"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = parallelize_fsdp(nn.Linear(4, 4), mesh, mp_policy=policy)
    out = model(torch.ones(2, 4))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert isinstance(model.weight.grad, sw.DTensor)
    torch.testing.assert_close(model.weight.grad.full_tensor(), torch.full((4, 4), 4.0))


def test_options_of_fully_shard_pass_through(ranks):
    ranks(2, _options)


def _options_by_position():
    mesh = rank_mesh((2,), ("dp",))
    texts = []
    kept = parallelize_fsdp(nn.Sequential(nn.Linear(4, 4)), mesh, False)
    kept(torch.ones(2, 4))
    held = groups_of(kept._get_fsdp_state())[0].is_unsharded, isinstance(kept[0].weight, sw.DTensor)
    for args, kwargs in (((False,), {"reshard_after_forward": True}), ((None,) * 9, {})):
        model = nn.Linear(4, 4)
        with pytest.raises(TypeError) as caught:
            parallelize_fsdp(model, mesh, *args, **kwargs)
        assert type(model) is nn.Linear
        texts.append(str(caught.value))
    return held, texts


def test_options_of_fully_shard_are_taken_by_position_too(ranks):
    """What is not resharded after the forward is kept whole then, behind the sharded parameters."""
    held, (twice, many) = ranks(2, _options_by_position)[0]
    assert held == (True, True)
    assert twice == "parallelize_fsdp got ['reshard_after_forward'] by position and by name"
    assert many.startswith("parallelize_fsdp takes at most")

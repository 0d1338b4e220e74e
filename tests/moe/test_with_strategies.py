"""A model with experts under each data-parallel strategy: gradients before the optimizer are one device's."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright.context import DeviceMeshParameters
from shardwright.errors import ParallelError
from shardwright.grads import GradientSynchronizer, clip_grad_norm_, global_mean
from shardwright.moe import MoELayer
from shardwright.parallel.context_parallel import parallelize_context
from shardwright.parallel.expert import parallelize_expert_parallel
from shardwright.parallel.fsdp import parallelize_fsdp
from shardwright.parallel.hsdp import parallelize_hsdp
from shardwright.parallel.replicate import parallelize_replicate
from shardwright.testing.meshes import rank_mesh
from tests.tiers import only

DEGREES = {
    "replicate": {"data_parallel_replicate": 4},
    "fsdp": {"data_parallel_shard": 4},
    "hsdp": {"data_parallel_replicate": 2, "data_parallel_shard": 2},
    "context replicate and fsdp": {"context_parallel_replicate": 2, "data_parallel_shard": 2},
}


def _model(dim):
    torch.manual_seed(0)
    layers = [nn.Linear(dim, dim), MoELayer(dim, 12, 4, 2, shared_expert_dim=6), nn.Linear(dim, dim)]
    return nn.Sequential(*layers)


def _tokens(counts, dim):
    return torch.randn(sum(counts), dim, generator=torch.Generator().manual_seed(1))


def _place(model, context, strategy):
    dense, expert = context.mesh_for("dense"), context.mesh_for("expert")
    parallelize_expert_parallel(
        model, mesh_experts=expert[["ep_replicate", "ep_shard"]], expert_shard_dim="ep_shard"
    )
    if strategy == "replicate":
        parallelize_replicate(model, dense[["dp_replicate", "cp_replicate"]])
    elif strategy == "fsdp":
        parallelize_fsdp(model, mesh=dense["dp_cp_shard"])
    elif strategy == "hsdp":
        parallelize_hsdp(model, dense[["dp_replicate", "dp_cp_shard"]])
    else:
        parallelize_replicate(model, mesh=dense["cp_replicate"])
        parallelize_fsdp(model, mesh=dense[["dp_replicate", "dp_cp_shard"]])


def _train(strategy, counts, ep, dim, passes, mode):
    context = DeviceMeshParameters(**DEGREES[strategy], expert_parallel=ep).build()
    model = _model(dim)
    _place(model, context, strategy)
    synchronizer = GradientSynchronizer(model)
    mine = _tokens(counts, dim).split(counts)[context.rank].clone().requires_grad_()
    for _ in range(passes):
        out = model(mine) if mode is None else checkpoint(model, mine, use_reentrant=mode == "reentrant")
        loss = global_mean(out.square().sum(), len(mine), context.mesh_for("batch")[["dp", "cp"]])
        loss.backward()
        synchronizer.synchronize()
    norm = clip_grad_norm_(model, 0.5)
    return loss.detach(), norm, {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def _one_device(counts, dim, passes):
    model = _model(dim)
    x = _tokens(counts, dim)
    for _ in range(passes):
        loss = model(x).square().sum() / len(x)
        loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return loss.detach(), norm, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("strategy", only(["replicate", "context replicate and fsdp"], DEGREES))
@pytest.mark.parametrize(
    ("counts", "ep", "dim", "passes", "mode"),
    [
        pytest.param((3, 0, 5, 2), 2, 8, 1, None, id="uneven, a rank without tokens"),
        pytest.param((3, 1, 4, 2), 4, 7, 1, None, id="sizes no kernel takes"),
        pytest.param((3, 0, 5, 2), 4, 8, 2, None, id="two backward passes, each synchronised"),
        pytest.param((3, 0, 5, 2), 2, 8, 1, "reentrant", id="reentrant checkpointing"),
        pytest.param((3, 0, 5, 2), 1, 8, 1, "saved tensors", id="every rank all experts, checkpointing"),
    ],
)
def test_loss_norm_and_gradients_are_those_of_one_device(ranks, strategy, counts, ep, dim, passes, mode):
    loss, norm, gradients = _one_device(counts, dim, passes)
    for got_loss, got_norm, got in ranks(4, _train, strategy, counts, ep, dim, passes, mode):
        torch.testing.assert_close(got_loss, loss)
        torch.testing.assert_close(got_norm, norm, rtol=1e-5, atol=0)
        for name, wanted in gradients.items():
            bound = 1e-5 * wanted.abs().max().item()
            torch.testing.assert_close(
                got[name], wanted, rtol=0, atol=bound, msg=lambda m, n=name: f"{n}: {m}"
            )


def _compiled():
    context = DeviceMeshParameters(data_parallel_replicate=2).build()
    model = _model(8)
    _place(model, context, "replicate")
    x = _tokens((4,), 8)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(x).square().sum(), list(model.parameters()))
    return [(a.to_local(), b.to_local()) for a, b in zip(got, expected, strict=True)]


# torch's tracer makes an instance of the class, which is what the warning tells users not to do.
@pytest.mark.filterwarnings(
    "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"
)
def test_experts_that_every_rank_holds_compile_as_one_graph(ranks):
    for pairs in ranks(2, _compiled):
        for got, expected in pairs:
            torch.testing.assert_close(got, expected)


def _over_one_axis(strategy):
    mesh = rank_mesh((2,), ("data",))
    model = _model(8)
    parallelize_expert_parallel(model, mesh_experts=mesh, expert_shard_dim="data")
    strategy(model, mesh)
    with pytest.raises(ParallelError, match="once per parameter and axis"):
        strategy(model, mesh)
    counts = (3, 5)
    mine = _tokens(counts, 8).split(counts)[mesh.get_local_rank()]
    global_mean(model(mine).square().sum(), len(mine), mesh).backward()
    GradientSynchronizer(model).synchronize()
    _, _, gradients = _one_device(counts, 8, 1)
    for name, p in model.named_parameters():
        scale = 0.5 / max(0.5, _norm(counts))  # the reference is clipped
        torch.testing.assert_close(p.grad.full_tensor() * scale, gradients[name], rtol=1e-4, atol=1e-5)


def _norm(counts):
    return float(_one_device(counts, 8, 1)[1])


@pytest.mark.parametrize("strategy", [parallelize_replicate, parallelize_fsdp])
def test_experts_and_data_may_share_one_axis(ranks, strategy):
    """What expert parallelism has placed there is left alone; the others may be placed once."""
    ranks(2, _over_one_axis, strategy)


def _before_context(strategy):
    """Experts over the data ranks alone, placed before the sequence is cut beside them."""
    mesh = rank_mesh((2, 2), ("dp", "cp"))
    model = parallelize_expert_parallel(_model(8), mesh["dp"], "dp")
    parallelize_context(model, mesh["cp"], output="whole")
    strategy(model, mesh["dp"])
    rows = _tokens((4 * 5,), 8).view(4, 5, 8).tensor_split([3])[mesh.get_local_rank("dp")]
    (model(rows).square().sum() / 20).backward()
    GradientSynchronizer(model).synchronize()
    _, norm, gradients = _one_device((4 * 5,), 8, 1)
    torch.testing.assert_close(clip_grad_norm_(model, 0.5), norm)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), gradients[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("strategy", [parallelize_replicate, parallelize_fsdp])
def test_experts_of_data_ranks_stand_in_a_model_whose_sequence_is_cut_afterwards(ranks, strategy):
    """Their weights had become DTensors beside the plain tokens that they are multiplied with."""
    ranks(4, _before_context, strategy)

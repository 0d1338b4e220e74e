"""A strategy on a part of a model and another on the whole: right as on one device, or refused by name."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.errors import ParallelError, RuleError
from shardwright.grads import GradientSynchronizer
from shardwright.parallel import parallelize_fsdp, parallelize_hsdp, parallelize_replicate
from shardwright.testing.meshes import rank_mesh

DATA = {
    "replicate": parallelize_replicate,
    "fsdp": parallelize_fsdp,
    "hsdp": lambda model, dp: parallelize_hsdp(model, dp, shard_dim="dp"),
}
# Which member is tensor parallel, and its plan; the others are the data strategy's alone.
PARTS = {
    "the first, by its outputs": (0, {"*": {"tp": sw.Shard(0)}}),
    "the first, by its inputs": (0, {"weight": {"tp": sw.Shard(1)}}),
    "the last, by its outputs": (2, {"*": {"tp": sw.Shard(0)}}),
    "the last, by its inputs": (2, {"weight": {"tp": sw.Shard(1)}}),
}


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 4))


def _gradients(model):
    found = {}
    for name, p in model.named_parameters():
        found[name] = p.grad.full_tensor() if isinstance(p.grad, sw.DTensor) else p.grad
    return found


def _same(got, wanted):
    for name, grad in wanted.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def _part_by_part(data):
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    x = torch.arange(15.0).view(5, 3) / 10
    mine = x.split((2, 3))[mesh.get_local_rank("dp")]
    for part, plan in PARTS.values():
        model, plain = _model(), _model()
        plain(x).square().sum().backward()
        sw.distribute_module(model[part], mesh["tp"], plan)
        DATA[data](model, mesh["dp"])
        with sw.spmd(mesh["tp"]):
            model(mine).square().sum().backward()
        GradientSynchronizer(model).synchronize()
        _same(_gradients(model), _gradients(plain))


@pytest.mark.parametrize("data", DATA)
def test_one_part_is_tensor_parallel_and_the_whole_is_data_parallel(ranks, data):
    ranks(4, _part_by_part, data)


def _rows_cut_over_an_axis_that_the_model_does_not_know():
    mesh = rank_mesh((1, 2), ("dp", "cp"))
    x = torch.arange(15.0).view(5, 3) / 10
    model, plain = _model(), _model()
    plain(x).square().sum().backward()
    parallelize_replicate(model, mesh["dp"])
    with sw.spmd(mesh["cp"]):
        model(sw.distribute_tensor(x, mesh["cp"], [sw.Shard(0)])).square().sum().backward()
    GradientSynchronizer(model).synchronize()
    _same(_gradients(model), _gradients(plain))


def test_rows_may_be_cut_over_an_axis_that_no_parameter_knows(ranks):
    ranks(2, _rows_cut_over_an_axis_that_the_model_does_not_know)


def _looked_at_in_mid_step(data):
    """A forward without gradients leaves norms, steps and writes what they were."""
    mesh = rank_mesh((2,), ("dp",))
    x = torch.arange(12.0).view(4, 3) / 10
    mine = x.split(2)[mesh.get_local_rank()]
    model, plain = _model(), _model()
    DATA[data](model, mesh)
    for each, rows in ((model, mine), (plain, x)):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        each(rows).square().sum().backward()
        with torch.no_grad():
            each(rows)
        if each is model:
            GradientSynchronizer(each).synchronize()
        norm = nn.utils.clip_grad_norm_(each.parameters(), 1.0)
        norm = norm.full_tensor() if isinstance(norm, sw.DTensor) else norm
        optimizer.step()
        with torch.inference_mode():
            found = norm, each(mine)
        each.zero_grad()
        assert all(p.grad is None for p in each.parameters())
        if each is model:
            got = found
    torch.testing.assert_close(got, found)


@pytest.mark.parametrize("data", DATA)
def test_a_look_at_the_model_in_mid_step_changes_nothing(ranks, data):
    ranks(2, _looked_at_in_mid_step, data)


class Later(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2, dtype=torch.bfloat16)


def _hooked():
    model = _model()
    model[0].weight.register_hook(lambda grad: grad * 2)
    return model


def _empty_part(mesh):
    model = nn.Linear(3, 1)
    sw.distribute_module(model, mesh["tp"], {"weight": {"tp": sw.Shard(0)}})
    return model


REFUSED = {
    "one dtype": lambda _: Later(),
    "no forward": lambda _: nn.ModuleList([nn.Linear(3, 3)]),
    "register_post_accumulate_grad_hook": lambda _: _hooked(),
    "holds nothing": _empty_part,
}


def _refused_before_anything_is_changed():
    mesh = rank_mesh((1, 2), ("dp", "tp"))
    for words, make in REFUSED.items():
        model = make(mesh)
        before = {name: (type(p), p) for name, p in model.named_parameters()}
        ways = [(DATA["fsdp"], mesh["dp"]), (DATA["hsdp"], mesh["dp"])]
        if make is not _empty_part:  # two axes: the replicated one is placed before the sharded one refuses
            ways.append((parallelize_fsdp, mesh))
            ways.append((lambda m, both: parallelize_hsdp(m, both, shard_dim="tp"), mesh))
        for strategy, over in ways:
            with pytest.raises(ParallelError, match=words):
                strategy(model, over)
            assert all(p is before[name][1] for name, p in model.named_parameters())


def test_what_fully_shard_fails_at_later_is_refused_when_it_is_placed(ranks):
    ranks(2, _refused_before_anything_is_changed)


def _gradients_that_autograd_never_sees():
    mesh = rank_mesh((2,), ("dp",))
    model = parallelize_fsdp(_model(), mesh)
    with pytest.raises(RuleError, match="register_post_accumulate_grad_hook"):
        model[0].weight.register_hook(lambda grad: grad * 2)
    unit = _model()
    parallelize_fsdp(unit[0], mesh)
    parallelize_fsdp(unit, mesh)
    loss = unit(torch.ones(2, 3)).sum()
    with pytest.raises(RuleError, match="weight is a parameter of torch's fully_shard"):
        torch.autograd.grad(loss, [unit[0].weight])
    embedding = parallelize_replicate(nn.Embedding(5, 3, max_norm=1.0), mesh)
    with pytest.raises(RuleError, match="rescaled in place"):
        embedding(torch.tensor([0, 1]))


def test_hooks_and_gradients_that_would_be_lost_are_refused(ranks):
    ranks(2, _gradients_that_autograd_never_sees)


def _copied():
    mesh = rank_mesh((2,), ("tp",))
    for placed in (False, True):
        model = nn.Linear(3, 2)
        if placed:
            sw.distribute_module(model, mesh, {"*": {"tp": sw.Shard(0)}})
        with sw.spmd(mesh):
            model(torch.ones(1, 3)).sum().backward()
            twin = copy.deepcopy(model)
        assert all(p.grad is None for p in twin.parameters()), placed
        assert all(p.grad is not None for p in model.parameters()), placed


def test_the_copy_of_a_parameter_has_no_gradient(ranks):
    ranks(2, _copied)


def _transformed():
    mesh = rank_mesh((2,), ("tp",))
    weight, x = torch.arange(12.0).view(4, 3), torch.arange(15.0).view(5, 3)
    wanted = torch.func.grad(lambda w: (x @ w.t()).square().sum())(weight)
    ours, rows = (
        sw.distribute_tensor(weight, mesh, [sw.Shard(0)]),
        sw.distribute_tensor(x, mesh, [sw.Replicate()]),
    )
    with sw.spmd(mesh):
        got = torch.func.grad(lambda w: functional.linear(rows, w).square().sum())(ours)
        each = torch.func.vmap(lambda row: ours @ row)(rows)
    torch.testing.assert_close(got.full_tensor(), wanted)
    torch.testing.assert_close(each.full_tensor(), x @ weight.t())


def test_transforms_see_distributed_tensors_inside_spmd(ranks):
    ranks(2, _transformed)


def _recomputed(reentrant, begins_at):
    mesh = rank_mesh((2,), ("tp",))
    x = torch.arange(15.0).view(5, 3) / 10
    model, plain = _model(), _model()
    plain(x).square().sum().backward()
    sw.distribute_module(model[0], mesh, {"*": {"tp": sw.Shard(0)}})
    rows = x.clone().requires_grad_()
    with sw.spmd(mesh):
        loss = checkpoint(model, rows, use_reentrant=reentrant).square().sum()
    (loss if begins_at == "a DTensor" else loss.full_tensor()).backward()
    assert type(model[2].weight.grad) is torch.Tensor
    _same(_gradients(model), _gradients(plain))


@pytest.mark.parametrize("begins_at", ["a DTensor", "a plain loss"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_plain_parameters_beside_distributed_ones_are_recomputed_after_the_block(ranks, reentrant, begins_at):
    ranks(2, _recomputed, reentrant, begins_at)

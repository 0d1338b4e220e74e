"""Gradients that are not finite are seen wherever they are, and no gradient is sent to look at it."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.errors import ImplicitRedistributionError
from shardwright.grads import GradScaler
from shardwright.parallel import Pipeline, parallelize_fsdp, parallelize_pipeline
from shardwright.testing.meshes import rank_mesh
from tests.witness.witness import Witness

R, S0, S1, SUM = sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Partial()
_X = torch.arange(12.0).view(3, 4)
_HUGE = 3e38


def _check(gradients):
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.tensor(0.5))
    return float(found)


def _parts_are_looked_at(row):
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    whole = _X.clone()
    if row is not None:
        whole[row, 3] = float("nan")
    for placements in ([S0, S1], [S0, R], [R, S1], [S1, S0], [R, R], [sw.Interleaved(0, 2), R]):
        one = sw.distribute_tensor(torch.ones(5), mesh["tp"], [R])
        x = sw.distribute_tensor(whole, mesh, placements)
        with Witness() as witness:
            assert _check([one, x]) == float(row is not None), (placements, row)
        assert torch.equal(one.full_tensor(), torch.full((5,), 0.5))
        torch.testing.assert_close(x.full_tensor(), whole / 2, equal_nan=True)
        others = 2 ** sum(p != R for p in placements) - 1
        assert sum(call.given for call in witness.asked if call.kind != "recv") <= 2 * 4 * others


@pytest.mark.parametrize("row", [None, 0, 2])
def test_one_number_travels_and_no_gradient(ranks, row):
    ranks(4, _parts_are_looked_at, row)


def _another_mesh_finds_it():
    """Only ranks 0 and 1 hold the one that is infinite; 2 and 3 hear of it through the other mesh."""
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    first = mesh.get_local_rank("dp") == 0
    own = sw.distribute_tensor(torch.full((4,), float("inf") if first else 1.0), mesh["tp"], [S0])
    assert _check([own, sw.distribute_tensor(torch.ones(4), mesh["dp"], [S0])]) == 1.0


def test_what_one_mesh_finds_travels_over_the_next(ranks):
    ranks(4, _another_mesh_finds_it)


def _sums_overflow():
    mesh = rank_mesh((2,), ("dp",))
    for term, is_bad in ((_HUGE, True), (1.0, False)):
        x = sw.DTensor.from_local(torch.full((3,), term), mesh, [SUM])
        assert _check([x, sw.distribute_tensor(_X, mesh, [S0])]) == float(is_bad)
        if not is_bad:
            assert torch.equal(x.full_tensor(), torch.ones(3))


def test_a_pending_gradient_is_looked_at_finished(ranks):
    ranks(2, _sums_overflow)


def _explicit_refuses():
    mesh = rank_mesh((2,), ("dp",))
    cut, whole = sw.distribute_tensor(_X, mesh, [S0]), sw.distribute_tensor(_X, mesh, [R])
    with sw.explicit():
        assert _check([whole]) == 0.0
        with pytest.raises(ImplicitRedistributionError, match="not finite on one of the ranks"):
            _check([whole, cut])
        with pytest.raises(ImplicitRedistributionError, match="not finite on one of the ranks"):
            _check([whole, sw.DTensor.from_local(torch.ones(3), mesh, [SUM])])
    assert torch.equal(whole.full_tensor(), _X / 2)
    assert torch.equal(cut.full_tensor(), _X)


def test_explicit_code_is_told_before_anything_is_changed(ranks):
    ranks(2, _explicit_refuses)


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def _steps(model, scaler, run, optimizer, hurt):
    """Four steps, the gradient of one parameter infinite in the second; parameters after each, and scales."""
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        x, y = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)), torch.ones(8, 2)
        run(x, y)
        for name, p in model.named_parameters():
            if step == 1 and name == hurt and p.grad is not None:
                with torch.no_grad():
                    p.grad.mul_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), {n: _whole(p) for n, p in model.named_parameters()}))
    return seen, scaler.state_dict()


def _whole(p):
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()


def _loss(out, target):
    return (out - target).square().sum()


def _stages_step_together(shape, fused, hurt, frozen, listed=False):
    mesh = rank_mesh(shape, ("pp", "dp")[: len(shape)])
    plain, model = _model(), _model()
    for each in (plain, model):
        for name, p in each.named_parameters():
            p.requires_grad_(not (frozen and name.startswith("0.")))
    parallelize_pipeline(model, mesh["pp"], ["2"])
    if "dp" in mesh.mesh_dim_names:
        parallelize_fsdp(model, mesh["dp"])
    one, ours = (cls("cpu", init_scale=64.0, growth_interval=2) for cls in (torch.amp.GradScaler, GradScaler))
    pipeline = Pipeline(model, lambda out, y: ours.scale(_loss(out, y)), micro_batches=2)
    given = [[p for p in m.parameters() if p.requires_grad or not listed] for m in (plain, model)]
    adam = [torch.optim.AdamW([{"params": each}], lr=0.1, fused=fused) for each in given]
    rank = mesh["dp"].get_local_rank() if len(shape) == 2 else 0
    rows = slice(4 * rank, 4 * rank + 4) if len(shape) == 2 else slice(None)
    want, state = _steps(plain, one, lambda x, y: one.scale(_loss(plain(x), y)).backward(), adam[0], hurt)
    have, own = _steps(model, ours, lambda x, y: pipeline.step(x[rows], target=y[rows]), adam[1], hurt)
    assert own == state
    assert [scale for scale, _ in want] == [64.0, 32.0, 32.0, 64.0]
    for (scale, parameters), (expected, all_parameters) in zip(have, want, strict=True):
        assert scale == expected
        for name, p in parameters.items():
            torch.testing.assert_close(p, all_parameters[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("shape", "hurt"), [((2,), "0.weight"), ((2,), "4.bias"), ((2, 2), "2.weight")])
def test_all_stages_take_a_step_or_none(ranks, shape, hurt, fused):
    ranks(4 if len(shape) == 2 else 2, _stages_step_together, shape, fused, hurt, False)


def test_a_frozen_stage_steps_with_the_others(ranks):
    ranks(2, _stages_step_together, (2,), False, "4.weight", True)
    ranks(2, _stages_step_together, (2,), False, "4.weight", True, True, fresh=True, timeout=30)

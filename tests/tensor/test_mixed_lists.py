"""Optimizers' lists over a model of which parts are placed: DTensors and plain tensors, each for itself."""

from __future__ import annotations

import pytest
import torch

import shardwright as sw
from shardwright.errors import RuleError
from shardwright.testing import rank_mesh

FUSED = ("Adam", "AdamW", "Adagrad", "SGD")
MORE = {"SGD": {"momentum": 0.9}, "Adam": {"amsgrad": True}, "RMSprop": {"momentum": 0.5, "centered": True}}
KINDS = [
    *((name, "foreach") for name in (
        "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
    )),
    *((name, "fused") for name in FUSED),
]  # fmt: skip


def _values(step):
    torch.manual_seed(step)
    return [torch.randn(6, 4), torch.randn(5), torch.randn(3, 4), torch.randn(2, 2)]


def _stepped(make, place):
    """Two steps over parameters of which the first and the third are placed."""
    parameters = [torch.nn.Parameter(place(i, x)) for i, x in enumerate(_values(0))]
    optimizer = make(parameters)
    for step in (1, 2):
        for i, (p, x) in enumerate(zip(parameters, _values(step), strict=True)):
            p.grad = place(i, x)
        optimizer.step()
    return parameters


def _placer():
    mesh = rank_mesh((2,), ("tp",))
    return lambda i, x: x if i % 2 else sw.distribute_tensor(x, mesh, {"tp": sw.Shard(0)}, src_data_rank=None)


def _beside(name, how):
    options = {"lr": 0.1, how: True, **MORE.get(name, {})}

    def make(parameters):
        return getattr(torch.optim, name)(parameters, **options)

    wanted, place = _stepped(make, lambda _, x: x), _placer()
    found = _stepped(make, place)
    for got, one in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.full_tensor() if isinstance(got, sw.DTensor) else got, one)


@pytest.mark.parametrize(("name", "how"), KINDS)
def test_an_optimizer_of_lists_steps_as_one_device(ranks, name, how):
    ranks(2, _beside, name, how)


def _results():
    place, values = _placer(), _values(0)
    mixed = [place(i, x) for i, x in enumerate(values)]
    given = list(mixed)
    found = torch._foreach_add(mixed, 1.0), torch._foreach_mul(mixed, [1.0, 2.0, 3.0, 4.0])
    wanted = torch._foreach_add(values, 1.0), torch._foreach_mul(values, [1.0, 2.0, 3.0, 4.0])
    for ours, theirs in zip(found, wanted, strict=True):
        assert type(ours) is type(theirs)
        assert [isinstance(x, sw.DTensor) for x in ours] == [True, False, True, False]
        for got, one in zip(ours, theirs, strict=True):
            torch.testing.assert_close(got.full_tensor() if isinstance(got, sw.DTensor) else got, one)
    assert [type(x) for x in torch._foreach_neg_(mixed)] == [type(x) for x in given]
    assert torch.equal(mixed[1], -_values(0)[1])


def test_results_come_in_the_order_of_the_lists(ranks):
    ranks(2, _results)


def _refused():
    place, values = _placer(), _values(0)
    mixed = [place(i, x.clone()) for i, x in enumerate(values)]
    number = place(0, torch.ones(2)).sum()
    before = [x.clone() for x in mixed]
    for call in (
        lambda: torch._foreach_add_(mixed, [mixed[0], values[1], values[2], values[3]]),
        lambda: torch._foreach_mul_(mixed, number),
        lambda: torch._foreach_norm(mixed),
    ):
        with pytest.raises(RuleError, match="where does it live"):
            call()
    for now, then in zip(mixed, before, strict=True):
        assert (
            torch.equal(now.to_local(), then.to_local())
            if isinstance(now, sw.DTensor)
            else torch.equal(now, then)
        )


def test_a_position_of_both_kinds_is_refused_before_any_is_written(ranks):
    ranks(2, _refused)


def _scaled(first, poisoned):
    place, values = _placer(), _values(0)
    parameters = [torch.nn.Parameter(place(i, x.clone())) for i, x in enumerate(values)]
    optimizer = torch.optim.SGD(parameters[::-1] if first == "last" else parameters, 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for p in parameters:
        scaler.scale(p.square().sum()).backward()
    if poisoned is not None:
        grad = parameters[poisoned].grad
        (grad.to_local() if isinstance(grad, sw.DTensor) else grad).view(-1)[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (8.0 if poisoned is None else 4.0)
    for p, x in zip(parameters, values, strict=True):
        found = p.full_tensor() if isinstance(p, sw.DTensor) else p.detach()
        torch.testing.assert_close(found, -x if poisoned is None else x)


@pytest.mark.parametrize("poisoned", [None, 0, 1])
@pytest.mark.parametrize("first", ["first", "last"])
def test_a_scaler_looks_at_placed_and_plain_gradients(ranks, first, poisoned):
    ranks(2, _scaled, first, poisoned)

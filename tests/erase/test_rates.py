"""Numbers of an optimizer that a schedule changes: one recording follows them, or is right without."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.testing import rank_mesh
from tests.tiers import one_in

optim = torch.optim
ROUNDS = 8
FOLLOWED = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.1, eps=1e-3, foreach=False),
    "adamw foreach": lambda p: optim.AdamW(p, lr=0.1, eps=1e-3, foreach=True),
    "adamw fused": lambda p: optim.AdamW(p, lr=0.1, eps=1e-3, fused=True),
    "amsgrad": lambda p: optim.Adam(p, lr=0.1, eps=1e-3, amsgrad=True, maximize=True),
    "nadam": lambda p: optim.NAdam(p, lr=0.1, eps=1e-3),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.1, eps=1e-3, foreach=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "two groups": lambda p: optim.AdamW(
        [{"params": [q], "lr": 0.1 / (i + 1)} for i, q in enumerate(p)], eps=1e-3, fused=True
    ),
}
_ON_ONE_DEVICE = FOLLOWED | {  # it rounds to bfloat16
    "muon": lambda p: optim.Muon([q for q in p if q.dim() == 2], lr=0.1)
}


def _pair(dtype=torch.float64):
    torch.manual_seed(0)
    plain = nn.Linear(4, 3, dtype=dtype)
    model = copy.deepcopy(plain)
    mesh = rank_mesh((2,), ("dp",))
    sw.distribute_module(model, mesh, {"weight": [sw.Shard(0)], "bias": [sw.Replicate()]})
    return plain, model, mesh


def _program(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _compare(make, program=_program, change=None, rounds=ROUNDS):
    """A program on one device and erased on a mesh, side by side; `change(optimizer, round)` between."""
    plain, model, mesh = _pair()
    optimizers = [make(list(m.parameters())) for m in (plain, model)]
    schedules = [optim.lr_scheduler.ExponentialLR(o, 0.8) for o in optimizers]
    one, fast = program(plain, optimizers[0]), sw.erase(program(model, optimizers[1]))
    for place in range(rounds):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(place), dtype=torch.float64)
        expected, found = one(x), fast(sw.distribute_tensor(x, mesh, [sw.Shard(0)]))
        torch.testing.assert_close(found.full_tensor(), expected)
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.full_tensor(), p)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            schedule.step() if change is None else change(optimizer, place)
        for group in optimizers[1].param_groups:
            assert type(group["lr"]) in {float, torch.Tensor}
    assert not optimizers[1]._optimizer_step_pre_hooks
    assert [g["lr"] for g in optimizers[0].param_groups] == [g["lr"] for g in optimizers[1].param_groups]
    return fast.report().recordings, fast.report().replays


def _follows(name):
    recordings, replays = _compare(FOLLOWED[name])
    assert recordings == 2  # with the rate that was there; then with any
    assert replays >= ROUNDS - 3  # the first step makes the states


def _a_tensor():
    assert _compare(lambda p: optim.SGD(p, lr=torch.tensor(0.1), momentum=0.9)) == (1, ROUNDS - 2)


def test_a_rate_that_is_a_tensor_is_read_at_each_step(ranks):
    ranks(2, _a_tensor)


@pytest.mark.parametrize("name", one_in(3, FOLLOWED))
def test_a_schedule_is_recorded_once(ranks, name):
    ranks(2, _follows, name)


def _read_by_the_program(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        loss = (model(x) * optimizer.param_groups[0]["lr"]).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _read_from_a_group(model, optimizer):
    (group,) = optimizer.param_groups

    def step(x):
        optimizer.zero_grad()
        loss = (model(x) * group["lr"]).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _with_a_closure(model, optimizer):
    def step(x):
        def closure():
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    return step


class Halving(optim.SGD):
    """Decides by its rate."""

    def step(self):
        group = self.param_groups[0]
        for p in group["params"]:
            with torch.no_grad():
                p.sub_(p.grad, alpha=group["lr"] if group["lr"] > 0.05 else 0.0)


def _tensors(optimizer, place):
    group = optimizer.param_groups[0]
    group["lr"] = torch.tensor(0.01) if place == 4 else 0.1 / (place + 1)


def _decay(optimizer, place):
    optimizer.param_groups[0]["weight_decay"] = (0.0, 0.1, 0.2, 0.0)[place % 4]


def _loaded(optimizer, place):
    optimizer.param_groups[0]["lr"] *= 0.7
    if place == 4:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _zero(optimizer, place):
    optimizer.param_groups[0]["lr"] = (0.1, 0.0, -0.0, float("inf"), 0.1)[place % 5] if place != 3 else 0.05


def _right(what):
    sgd = lambda p: optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731
    programs = {
        "read by the program": lambda: _compare(sgd, _read_by_the_program),
        "read from a group": lambda: _compare(sgd, _read_from_a_group),
        "a closure": lambda: _compare(sgd, _with_a_closure),
        "one of the user's": lambda: _compare(lambda p: Halving(p, lr=0.1)),
        "decides by the step": lambda: _compare(lambda p: optim.RAdam(p, lr=0.1)),
        "tensors": lambda: _compare(FOLLOWED["adamw"], change=_tensors),
        "weight decay": lambda: _compare(FOLLOWED["adamw foreach"], change=_decay),
        "decides by weight decay": lambda: _compare(sgd, change=_decay),
        "loaded": lambda: _compare(FOLLOWED["adamw"], change=_loaded),
        "zero": lambda: _compare(sgd, change=_zero),
        "cycled": lambda: _compare(sgd, change=_cycled),
    }
    programs[what]()


def _cycled(optimizer, place):
    optimizer.param_groups[0]["momentum"] = 0.9 - 0.05 * place


CASES = (
    "read by the program", "read from a group", "a closure", "one of the user's", "decides by the step",
    "tensors", "weight decay", "decides by weight decay", "loaded", "zero", "cycled",
)  # fmt: skip


@pytest.mark.parametrize("what", one_in(3, CASES))
def test_where_a_number_cannot_be_followed_the_answer_is_right(ranks, what):
    ranks(2, _right, what)


def _one_after_the_other():
    """Groups whose rates begin to change at different times: what a recording covers is no failed attempt."""
    placed = sw.distribute_tensor(torch.ones(4), rank_mesh((2,), ("dp",)), [sw.Shard(0)])
    parameters = [nn.Parameter(placed.clone()) for _ in range(3)]
    optimizer = optim.AdamW([{"params": [p]} for p in parameters], lr=0.1)

    def step():
        optimizer.zero_grad()
        sum(p.square().sum() for p in parameters).backward()
        optimizer.step()

    fast = sw.erase(step)
    for turn in range(15):
        for place, group in enumerate(optimizer.param_groups):
            group["lr"] = 0.1 / (1 + turn) if turn > 3 * place + 2 else 0.1
        fast()
    assert fast.report().replays == 10, str(fast.report())
    assert not fast.report().as_it_is, str(fast.report())


def test_rates_that_change_one_after_the_other_are_followed(ranks):
    ranks(2, _one_after_the_other)


def _of_two_sizes(name):
    """Calls of another size record for themselves, and find the same number to follow."""
    torch.manual_seed(0)
    plain = nn.Linear(4, 3, dtype=torch.float64)
    model = copy.deepcopy(plain)
    optimizers = [_ON_ONE_DEVICE[name](list(m.parameters())) for m in (plain, model)]
    schedules = [optim.lr_scheduler.StepLR(o, 3, 0.5) for o in optimizers]
    one, fast = _program(plain, optimizers[0]), sw.erase(_program(model, optimizers[1]))
    for place in range(18):
        x = torch.randn(3 + place % 3 // 2, 4, dtype=torch.float64)
        torch.testing.assert_close(fast(x), one(x), rtol=0, atol=0)
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(p, q)
        for schedule in schedules:
            schedule.step()
    assert fast.report().recordings == 4, str(fast.report())
    assert fast.report().replays >= 10, str(fast.report())


@pytest.mark.parametrize("name", ["sgd", "adamw", "adamw foreach", "adamw fused", "muon"])
def test_calls_of_two_sizes_follow_one_number(name):
    _of_two_sizes(name)


def _hook():
    """A hook of the user's reads a number, not what stands for it."""
    seen = []

    def make(p):
        optimizer = optim.SGD(p, lr=0.1)
        optimizer.register_step_pre_hook(lambda o, *_: seen.append(type(o.param_groups[0]["lr"])))
        return optimizer

    _, model, mesh = _pair()
    optimizer = make(list(model.parameters()))
    fast = sw.erase(_program(model, optimizer))
    for place in range(4):
        fast(sw.distribute_tensor(torch.ones(6, 4, dtype=torch.float64), mesh, [sw.Shard(0)]))
        optimizer.param_groups[0]["lr"] = 0.1 / (place + 1)
    assert set(seen) == {float}


def test_hooks_of_the_program_see_numbers(ranks):
    ranks(2, _hook)


def _interrupted():
    """A step that raises leaves the group as it was."""
    _, model, mesh = _pair()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    x = sw.distribute_tensor(torch.ones(6, 4, dtype=torch.float64), mesh, [sw.Shard(0)])
    fast = sw.erase(_program(model, optimizer))
    fast(x)
    optimizer.param_groups[0]["lr"] = 0.05
    model.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", torch.ones(2, 2)))
    for _ in range(2):
        with pytest.raises(RuntimeError):
            fast(x)
        assert type(optimizer.param_groups[0]["lr"]) is float
        assert not optimizer._optimizer_step_pre_hooks


def test_a_step_that_raises_leaves_the_number(ranks):
    ranks(2, _interrupted)


@pytest.mark.parametrize("inside", [True, False])
def test_schedules_in_a_chain_are_stepped(inside):
    """The chain has no count of its own."""
    weights, losses = [], []
    for erase in (sw.erase, lambda function: function):
        weight = nn.Parameter(torch.ones(3))
        optimizer = optim.SGD([weight], lr=0.1, momentum=0.5)
        parts = [
            optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2),
            optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
        ]
        schedule = optim.lr_scheduler.ChainedScheduler(parts)

        def step(weight=weight, optimizer=optimizer, schedule=schedule):
            optimizer.zero_grad()
            loss = weight.square().sum()
            loss.backward()
            optimizer.step()
            if inside:
                schedule.step()
            return loss.detach()

        fast, found = erase(step), []
        for _ in range(ROUNDS):
            found.append(fast())
            if not inside:
                schedule.step()
        losses.append(found)
        weights.append(weight)
    torch.testing.assert_close(*weights)
    torch.testing.assert_close(*losses)

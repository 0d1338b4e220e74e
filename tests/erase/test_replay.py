"""A replay gives what one device gives: values, gradients, parameters and states after steps."""

import copy
import cProfile
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.grads import clip_grad_norm_
from shardwright.parallel import parallelize_tensor
from shardwright.testing.meshes import rank_mesh
from tests.tiers import one_in

from .programs import assert_equal, assert_replayed, batches, block, placed


def _function():
    mesh = rank_mesh((dist.get_world_size(),), ("tp",))
    torch.manual_seed(1)
    a, b = torch.randn(6, 8), torch.randn(8, 10)

    def pair(x, y, scale, *, shift=0.0):
        z = x @ y
        return {"z": nn.functional.gelu(z) * scale + shift, "parts": [z.sum(), z.softmax(-1)]}

    fast = sw.erase(pair)
    for step in range(3):
        wanted = pair(a + step, b, 2.0, shift=1.0)
        x = sw.distribute_tensor(a + step, mesh, {"tp": sw.Shard(1)})
        y = sw.distribute_tensor(b, mesh, {"tp": sw.Shard(0)})
        found = fast(x, y, 2.0, shift=1.0)
        assert_equal(found["z"], wanted["z"])
        for one, other in zip(found["parts"], wanted["parts"], strict=True):
            assert_equal(one, other)
    assert_replayed(fast, 1, 2)


@pytest.mark.parametrize("world", [1, 2])
def test_a_function_gives_what_one_device_gives(ranks, world):
    ranks(world, _function)


def _forward_and_backward(placing):
    plain = block()
    model, place = placed(plain, placing, dist.get_world_size())
    fast = sw.erase(model)
    for batch in batches(3):
        x = batch.clone().requires_grad_()
        y = plain(x)
        y.pow(2).sum().backward()
        given = place(batch).requires_grad_()
        found = fast(given)
        assert_equal(found, y)
        found.pow(2).sum().backward()
        assert_equal(given.grad, x.grad)
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert p.grad is not None, name
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=2e-5, atol=1e-5, msg=name)
        for module in (plain, model):
            module.zero_grad()
    assert_replayed(fast, 1, 2)


@pytest.mark.parametrize("placing", ["batch", "tensor"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_module_has_the_gradients_of_one_device(ranks, world, placing):
    ranks(world, _forward_and_backward, placing)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, fused=True),
}


def make_step(model, optimizer, clip):
    def step(x):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        if clip is not None:
            clip(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    return step


def _steps(name, placing):
    plain = block()
    model, place = placed(plain, placing, dist.get_world_size())
    eager, _ = placed(plain, placing, dist.get_world_size())
    one = make_step(plain, OPTIMIZERS[name](plain.parameters()), nn.utils.clip_grad_norm_)
    optimizer, other = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](eager.parameters())
    fast = sw.erase(make_step(model, optimizer, clip_grad_norm_))
    slow = make_step(eager, other, clip_grad_norm_)
    for batch in batches(6):
        wanted = one(batch)
        assert_equal(fast(place(batch)), wanted)
        slow(place(batch))
    for p, q, e in zip(model.parameters(), plain.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-4, atol=1e-5)
        assert torch.equal(p.to_local(), e.to_local())
        for key, value in other.state[e].items():
            assert torch.equal(sw_local(optimizer.state[p][key]), sw_local(value)), key
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-5)
    report = fast.report()
    assert (report.recordings, report.replays) == (1, 4), str(report)  # the first step makes the states


def sw_local(x):
    return x.to_local() if isinstance(x, sw.DTensor) else x


STEPS = list(product(OPTIMIZERS, [(1, "batch"), (2, "batch"), (2, "tensor")]))


@pytest.mark.parametrize(("name", "case"), one_in(6, STEPS))
def test_steps_leave_the_parameters_of_one_device(ranks, name, case):
    world, placing = case
    ranks(world, _steps, name, placing)


def _one_row():
    """A rank that holds nothing of a weight runs no kernel with the number that its optimizer computes."""
    torch.manual_seed(0)
    mesh, plain = rank_mesh((2,), ("tp",)), nn.Linear(4, 1)
    model = sw.distribute_module(copy.deepcopy(plain), mesh, {"weight": {"tp": sw.Shard(0)}})
    one = make_step(plain, OPTIMIZERS["adamw"](plain.parameters()), None)
    fast = sw.erase(make_step(model, OPTIMIZERS["adamw"](model.parameters()), None))
    for x in batches(5, (3, 4)):
        assert_equal(fast(sw.distribute_tensor(x, mesh, {"tp": sw.Replicate()})), one(x))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert_equal(p, q)
    assert fast.report().replays == 3, str(fast.report())


def test_a_rank_that_holds_nothing_replays(ranks):
    ranks(2, _one_row)


def _clipped(inside):
    """Ranks tell each other which gradients they have, in a block too; a replay compares that."""
    mesh = rank_mesh((2,), ("tp",))
    model = parallelize_tensor(
        nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8)), mesh, {"0": "colwise", "1": "rowwise"}
    )
    step = make_step(model, OPTIMIZERS["sgd"](model.parameters()), clip_grad_norm_)

    def around(x):
        with sw.spmd(mesh) if inside else nullcontext():
            return step(x)

    fast = sw.erase(around)
    for x in batches(3, (4, 8)):
        fast(sw.distribute_tensor(x, mesh, {"tp": sw.Replicate()}))
    assert " expect(" in str(fast), str(fast.report())


@pytest.mark.parametrize("inside", [False, True])
def test_what_ranks_tell_each_other_stands_in_the_printed_program(ranks, inside):
    ranks(2, _clipped, inside)


BLOCKS = {"spmd": sw.spmd, "device": lambda _: torch.device("cpu")}


def _inside(block):
    """An optimizer reads its step counts through the block's mode; the program's own reads stay refused."""
    mesh, plain = rank_mesh((2,), ("tp",)), block_of_one()
    model = sw.distribute_module(copy.deepcopy(plain), mesh, {"weight": {"tp": sw.Shard(0)}})
    steps = []
    for m, around in ((plain, lambda _: nullcontext()), (model, BLOCKS[block])):
        optimizer = OPTIMIZERS["adamw"](m.parameters())

        def step(x, m=m, optimizer=optimizer, around=around):
            with around(mesh):
                optimizer.zero_grad()
                loss = m(x).square().mean()
                loss.backward()
                optimizer.step()
            return loss.detach()

        steps.append(step)
    one, fast = steps[0], sw.erase(steps[1])
    for x in batches(6, (4, 6)):
        assert_equal(fast(sw.distribute_tensor(x, mesh, {"tp": sw.Replicate()})), one(x))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert_equal(p, q)
    assert (fast.report().recordings, fast.report().replays) == (1, 4), str(fast.report())

    def reads(x):
        with BLOCKS[block](mesh):
            return x * x.sum().item()

    fast, x = sw.erase(reads), torch.arange(4.0)
    for turn in range(4):
        assert_equal(fast(x + turn), (x + turn) * (x + turn).sum())
    assert fast.report().replays == 0
    assert f"{__file__}:" in str(fast.report())


def block_of_one():
    torch.manual_seed(0)
    return nn.Linear(6, 8)


@pytest.mark.parametrize("block", BLOCKS)
def test_an_optimizer_that_steps_inside_of_a_block_is_replayed(ranks, block):
    ranks(2, _inside, block)


def _under_a_profiler():
    given = sw.distribute_tensor(torch.ones(4), rank_mesh((2,), ("dp",)), [sw.Shard(0)])
    fast, profiler = sw.erase(lambda x: (x * 2).sum()), cProfile.Profile()
    for turn in range(6):
        x = given.detach().requires_grad_()
        if turn in {0, 2, 4}:
            profiler.enable()
        found = fast(x)
        if turn == 1:
            profiler.enable()
        found.backward()
        profiler.disable()
        assert_equal(x.grad, 2 * torch.ones(4))
    assert fast.report().replays >= 2, str(fast.report())
    assert "profiler" in str(fast.report()), str(fast.report())


def test_a_profiler_keeps_its_place(ranks):
    """One of C cannot be put back: a call that it looks at is not recorded."""
    ranks(2, _under_a_profiler)

"""A replay that reads another truth, or hears something else of its peers, is undone, and the call runs."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.grads import GradientSynchronizer, global_mean
from shardwright.parallel import parallelize_replicate
from shardwright.testing.meshes import rank_mesh

from .programs import full


class _Forked(nn.Module):
    """An odd number of rows goes another way, with other parameters; rows are counted."""

    def __init__(self):
        super().__init__()
        self.odd, self.even = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return (self.odd if len(x) % 2 else self.even)(x)


# Rows of both ranks in each step. All of one kind are replays soon; then ranks have other gradients.
ROWS = [(2, 2), (2, 2), (2, 2), (2, 2), (2, 3), (2, 2), (3, 3), (2, 0), (2, 2), (3, 3)]


def _ranks_with_other_gradients(overlapped):
    torch.manual_seed(0)
    plain = _Forked()
    model, mesh, rank = copy.deepcopy(plain), rank_mesh((2,), ("dp",)), dist.get_rank()
    parallelize_replicate(model, mesh)
    reference, optimizer = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model))
    synchronizer = GradientSynchronizer(model)

    def step(x):
        noise = torch.rand(())
        if len(x):
            loss = model(x * noise).square().sum()
        else:
            model.calls += 1
            loss = noise * 0
        mean = global_mean(loss, torch.tensor(float(len(x))), mesh)
        with synchronizer.overlapped() if overlapped else nullcontext():
            if len(x):
                mean.backward()
        synchronizer.synchronize()
        optimizer.step()
        optimizer.zero_grad()
        return mean.detach()

    fast = sw.erase(step)
    for turn, rows in enumerate(ROWS):
        parts = torch.randn(sum(rows), 4).split(rows)
        torch.manual_seed(turn)
        reference.zero_grad()
        noise = torch.rand(())
        wanted = sum(plain(x * noise).square().sum() for x in parts) / sum(rows)
        wanted.backward()
        reference.step()
        torch.manual_seed(turn)
        torch.testing.assert_close(full(fast(parts[rank])), wanted.detach())
        assert model.calls == turn + 1
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p), q)
    report = fast.report()
    assert report.replays >= 2, str(report)
    return sum(report.as_it_is.values())


def test_a_rank_whose_peers_have_other_gradients_trains_on(ranks):
    for overlapped in (False, True):
        assert sum(ranks(2, _ranks_with_other_gradients, overlapped)) > 0


def _net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 4))


def _skipping(model, optimizer):
    """The step of a loss that is too large is left out."""

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if loss > 50:
            return loss.detach() - 1
        loss.backward()
        if torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
            optimizer.step()
        return loss.detach()

    return step


def _raising(model, optimizer):
    def step(x):
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).square().mean()
        loss.backward()
        if loss > 50:
            raise ValueError("the loss is too large")
        optimizer.step()
        return loss.detach()

    return step


def _scaled(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return torch.stack([loss.detach(), scaler._scale])

    return step


def _result(step, x):
    try:
        return step(x)
    except ValueError as error:
        return torch.tensor(float(len(str(error))))


@pytest.mark.parametrize("made", [_skipping, _raising, _scaled])
def test_truths_of_what_a_step_computes_are_those_of_its_own_batch(made):
    """Also where a step wrote statistics and gradients, and drew a mask, before it came to another one."""
    kept = []
    for erased in (False, True):
        model = _net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = made(model, optimizer)
        fast = sw.erase(step) if erased else step
        torch.manual_seed(2)
        batches = [torch.randn(8, 4) * (math.inf if turn in (6, 9) else 1.0) for turn in range(12)]
        kept.append([_result(fast, x) for x in batches])
        kept[-1] += [
            *model.state_dict().values(),
            *(p.grad for p in model.parameters()),
            torch.get_rng_state(),
        ]
    for one, two in zip(*kept, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)
    assert fast.report().replays >= 7, str(fast.report())
    assert sum(fast.report().as_it_is.values()) <= 3, str(fast.report())


def _writes_into_an_answer():
    """What a collective gave is written before the truth that goes otherwise: the call gets it as it came."""
    mesh = rank_mesh((2,), ("tp",))

    def step(x):
        whole = x.redistribute({"tp": sw.Replicate()}) if isinstance(x, sw.DTensor) else x.clone()
        whole.mul_(2)
        return whole + 1 if whole.sum() > 10 else whole - 1

    fast = sw.erase(step)
    for value in (5.0, 5.0, 0.1, 5.0, 0.1):
        x = torch.full((6,), value)
        torch.testing.assert_close(full(fast(sw.distribute_tensor(x, mesh, {"tp": sw.Shard(0)}))), step(x))
    report = fast.report()
    assert (report.replays, sum(report.as_it_is.values())) == (2, 2), str(report)


def test_an_answer_that_a_replay_wrote_into_is_given_again_as_it_came(ranks):
    ranks(2, _writes_into_an_answer)

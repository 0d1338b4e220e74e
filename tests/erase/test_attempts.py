"""What failed attempts say and cost: the first tells of all that stands in the way, the others give up."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.erased import watch
from shardwright.testing.meshes import rank_mesh

from .programs import assert_equal, batches, block, full, placed

SEEN = []


def _reads_and_lists(x):
    value = x.sum().item()
    return x * value + x.tolist()[0]


def _lists_once(x):
    """The first refusal is one of the first call alone."""
    if not SEEN:
        SEEN.extend(x.tolist())
    return x * x.sum().item()


def test_the_first_attempt_tells_of_all_reasons():
    fast = sw.erase(_reads_and_lists)
    for turn in range(5):
        x = torch.arange(4.0) + turn
        assert_equal(fast(x), _reads_and_lists(x))
    refusals = fast.report().refusals
    assert sorted(refusals.values()) == [1, 3]
    assert any("item()" in line for line in refusals)
    assert any("Tensor.tolist" in line for line in refusals)


def test_what_lasts_is_the_reason_why_a_call_runs_as_it_is():
    SEEN.clear()
    fast = sw.erase(_lists_once)
    for turn in range(5):
        fast(torch.arange(4.0) + turn)
    (why,) = fast.report().as_it_is
    assert "item()" in why
    assert "Tensor.tolist" in next(iter(fast.report().refusals))


def _trained(late):
    """A step that reads its loss, before or behind its optimizer, trains as on one device, hurried or not."""
    plain = block()
    model, place = placed(plain, "tensor", dist.get_world_size())
    steps = []
    for m in (plain, model):
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-3)

        def step(x, m=m, optimizer=optimizer):
            optimizer.zero_grad()
            loss = m(x).pow(2).mean()
            scale = 1.0 if late else full(loss).item()
            (loss * scale).backward()
            optimizer.step()
            return loss.detach() * (full(loss).item() if late else scale)

        steps.append(step)
    one, fast = steps[0], sw.erase(steps[1])
    for batch in batches(6):
        assert_equal(fast(place(batch)), one(batch))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-4, atol=1e-5)
    assert fast.report().replays == 0
    (why,) = fast.report().as_it_is
    assert "item()" in why, why


def test_attempts_that_give_up_train_as_one_device(ranks):
    for late in (False, True):
        ranks(2, _trained, late)


def _graphs():
    """The results of an attempt that gives up hang on its graph, and its backward is the call's own."""
    mesh = rank_mesh((2,), ("tp",))
    torch.manual_seed(0)
    weight = torch.randn(4, 4)
    given = nn.Parameter(sw.distribute_tensor(weight, mesh, [sw.Shard(0)]))
    plain = nn.Parameter(weight.clone())

    def program(w):
        return (w * full(w).sum().item()).sin()

    fast = sw.erase(program)
    for _ in range(5):
        fast(given).sum().backward()
        program(plain).sum().backward()
        assert_equal(given.grad, plain.grad)
    assert fast.report().replays == 0


def test_results_of_attempts_that_give_up_have_their_gradients(ranks):
    ranks(2, _graphs)


def test_an_attempt_after_the_first_looks_no_further_than_the_first_reason(monkeypatch):
    told, whole = [], watch.Watch._event

    def counted(self, frame, event, what):
        told.append(event)
        return whole(self, frame, event, what)

    def long(x):
        x = x * x.sum().item()
        for _ in range(50):
            x = torch.tanh(nn.functional.gelu(x) + x)
        return x

    monkeypatch.setattr(watch.Watch, "_event", counted)
    fast, counts = sw.erase(long), []
    for _ in range(3):
        told.clear()
        fast(torch.ones(4))
        counts.append(len(told))
    assert counts[1] < counts[0] / 5, counts
    assert counts[2] < counts[0] / 5, counts


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="there a hook that comes and goes costs more")
def test_a_recording_is_not_watched_while_it_looks_at_an_operator(monkeypatch):
    """What it did itself was most of what the hook saw: hundreds of calls for each operator."""
    told, whole = [], watch.Watch._event

    def counted(self, frame, event, what):
        told.append(frame.f_code.co_filename)
        return whole(self, frame, event, what)

    monkeypatch.setattr(watch.Watch, "_event", counted)
    fast = sw.erase(lambda x: [x := torch.sinh(x) for _ in range(100)][-1])
    fast(torch.ones(4))
    assert fast.report().recordings == 1
    assert len(told) < 100 * 40, len(told)

"""Steps that nobody has synchronised, where each rank's rows take other branches: as on one device."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright.comm.record import Recorder
from shardwright.grads import GradientSynchronizer, clip_grad_norm_
from shardwright.parallel import parallelize_replicate
from shardwright.testing import rank_mesh


class _Branches(nn.Module):
    """Row i goes through branch `of[i]`."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.branches = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x, of):
        x = self.first(x)
        return sum(self.branches[at](x[of == at]).square().sum() for at in of.unique())


_BRANCHES = {"others": [0, 1, 2], "one": [1, 1, 1], "two": [0, 0, 2]}
_OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "by lists": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
}


def _steps(world, optimizer, branches, idle):
    torch.manual_seed(0)
    alone, rank = _Branches(), dist.get_rank()
    model = parallelize_replicate(copy.deepcopy(alone), rank_mesh((world,), ("dp",)))
    ours, theirs = (_OPTIMIZERS[optimizer](m.parameters()) for m in (model, alone))
    for step in range(3):
        rows, of = torch.randn(world, 3), torch.tensor(_BRANCHES[branches])[:world].roll(step)
        used = rows[:-1] if idle else rows
        alone(used, of[: len(used)]).backward()
        if rank < len(used):
            model(rows[rank : rank + 1], of[rank : rank + 1]).backward()
        if step == 1 and not idle:  # a backward that comes after a synchronisation
            GradientSynchronizer(model).synchronize()
            alone(rows.flip(0), of).backward()
            model(rows.flip(0)[rank : rank + 1], of[rank : rank + 1]).backward()
        if step == 2:
            wanted = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
            torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.1).cpu(), wanted)
        for each in (ours, theirs):
            each.step()
            each.zero_grad()
    for (name, mine), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.to_local(), other, msg=name)


def _all_steps(optimizer):
    for branches in _BRANCHES:
        for idle in (False, True):
            _steps(3, optimizer, branches, idle)


@pytest.mark.parametrize("optimizer", _OPTIMIZERS)
def test_a_step_finishes_the_gradients_of_all_ranks_together(ranks, optimizer):
    ranks(3, _all_steps, optimizer)


def _sent():
    """What steps send after a synchronisation, without one, and after a backward that came later."""
    model = parallelize_replicate(nn.Linear(4, 4), rank_mesh((2,), ("dp",)))
    optimizer, synchronizer = torch.optim.SGD(model.parameters(), lr=0.1), GradientSynchronizer(model)
    sent = []
    for backwards in (["sync"], [], ["sync", "more"]):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        if "sync" in backwards:
            synchronizer.synchronize()
        if "more" in backwards:
            model(torch.randn(2, 4)).sum().backward()
        with Recorder() as recorder:
            optimizer.step()
        sent.append(len(recorder.collectives))
    with synchronizer.overlapped():
        model(torch.randn(2, 4)).sum().backward()
    with Recorder() as recorder:
        optimizer.step()
    whole = [torch.empty(4, 4) for _ in range(2)]
    dist.all_gather(whole, model.weight.detach().to_local())
    return [*sent, len(recorder.collectives)], torch.equal(*whole)


def test_a_step_after_a_synchronisation_sends_nothing(ranks):
    for (synchronised, alone, more, overlapped), same in ranks(2, _sent):
        assert (synchronised, overlapped) == (0, 0)
        assert alone > 0
        assert more > 0
        assert same


def _after_a_synchronisation_that_no_step_used(set_to_none):
    """A norm was measured once; later a rank has no rows, and did not ask where the other one did."""
    mesh = rank_mesh((2,), ("dp",))
    torch.manual_seed(0)
    alone, x = nn.Linear(4, 1), torch.arange(8.0).view(2, 4) / 8
    model = parallelize_replicate(copy.deepcopy(alone), mesh)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
    model(x).sum().backward()
    GradientSynchronizer(model).synchronize()
    optimizers[1].zero_grad(set_to_none=set_to_none)
    alone(x).sum().backward()
    if mesh.get_local_rank() == 0:
        model(x).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_all_ranks_ask_after_a_synchronisation_of_other_gradients(ranks, set_to_none):
    ranks(2, _after_a_synchronisation_that_no_step_used, set_to_none, timeout=60)


def _used_up(sent_by):
    """Gradients that nobody zeroes: a rank without rows keeps the sum that the last step has used."""
    mesh = rank_mesh((2,), ("dp",))
    torch.manual_seed(0)
    alone, x = nn.Linear(4, 1), torch.arange(8.0).view(2, 4) / 8
    model = parallelize_replicate(copy.deepcopy(alone), mesh)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
    rank = mesh.get_local_rank()
    for rows in (2, 1):
        alone(x[:rows]).sum().backward()
        if rank < rows:
            model(x[rank : rank + 1]).sum().backward()
        if sent_by == "synchronizer" and rows == 2:
            GradientSynchronizer(model).synchronize()
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q)


@pytest.mark.parametrize("sent_by", ["synchronizer", "step"])
def test_a_step_uses_up_what_was_synchronised(ranks, sent_by):
    ranks(2, _used_up, sent_by, timeout=60)


def _frozen_before_the_sum(how):
    """Ranks whose rows take other branches, and a model that is frozen while its gradients wait."""
    mesh = rank_mesh((2,), ("dp",))
    torch.manual_seed(0)
    alone, x = _Branches(), torch.randn(6, 3)
    model = parallelize_replicate(copy.deepcopy(alone), mesh)
    synchronizer = GradientSynchronizer(model)
    of, rank = torch.tensor([0, 0, 0, 2, 2, 2]), mesh.get_local_rank()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
    for _ in range(2):
        alone(x, of).backward()
        loss = model(x[3 * rank :][:3], of[3 * rank :][:3])
        if how == "overlapped":
            loss.backward()
            model.requires_grad_(False)
            with synchronizer.overlapped():
                pass
        else:
            loss.backward()
            model.requires_grad_(False)
            if how == "synchronized":
                synchronizer.synchronize()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        model.requires_grad_(True)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["at the step", "synchronized", "overlapped"])
def test_gradients_of_what_was_frozen_since_are_summed(ranks, how):
    """Gradients of other parameters were added up, or the ranks waited for each other."""
    ranks(2, _frozen_before_the_sum, how, timeout=60)

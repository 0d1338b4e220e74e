"""torch's debugging modes see what operations on our tensors send; where they cannot, a warning says so."""

from __future__ import annotations

import warnings
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._debug_mode import DebugMode

import shardwright as sw
from shardwright.grads import GradientSynchronizer
from shardwright.parallel import parallelize_replicate
from shardwright.testing import rank_mesh


def _model(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6, bias=False))
    cut = {"0.weight": [sw.Shard(0)], "0.bias": [sw.Shard(0)], "2.weight": [sw.Shard(1)]}
    return sw.distribute_module(model, mesh, cut)


def _counts(mode) -> dict[str, int]:
    """By kind: torch writes a kind in several ways."""
    kinds = Counter()
    for op, count in mode.get_comm_counts().items():
        name = str(op).split(".")[1].replace("allreduce", "all_reduce")
        kinds[next(kind for kind in ("all_reduce", "all_gather", "all_to_all") if name.startswith(kind))] += (
            count
        )
    return dict(kinds)


def _step():
    mesh = rank_mesh((2,), ("tp",))
    model, x = _model(mesh), torch.randn(4, 6, requires_grad=True)
    cut = sw.distribute_tensor(torch.randn(4, 6), mesh, [sw.Shard(0)])
    with CommDebugMode() as counted, sw.trace() as t:
        with sw.spmd(mesh):
            model(x).square().mean().backward()
        cut.softmax(0).full_tensor()
    with DebugMode() as shown, sw.trace() as again:
        cut.softmax(0).redistribute({"tp": sw.Replicate()})
    listed = dict(Counter(event.op for event in t.collectives))
    return _counts(counted), listed, shown.debug_string(), [event.op for event in again.collectives]


def test_the_modes_of_torch_count_what_our_operations_send(ranks):
    for counted, listed, shown, again in ranks(2, _step):
        assert counted == listed
        assert sum(counted.values()) >= 4
        assert [op for op in again if op in shown] == again == ["all_to_all", "all_gather"]


def _sums_gradients(overlapped):
    model = parallelize_replicate(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)), rank_mesh((2,), ("dp",)))
    synchronizer = GradientSynchronizer(model)
    with CommDebugMode() as counted, sw.trace() as t:
        with synchronizer.overlapped() if overlapped else nullcontext():
            model(torch.ones(4, 6, requires_grad=True)).sum().backward()
        synchronizer.synchronize()
    assert model[1].bias.grad.to_local().tolist() == [8.0] * 6  # of two ranks with four rows each
    return _counts(counted), dict(Counter(event.op for event in t.collectives))


@pytest.mark.parametrize("overlapped", [False, True])
def test_sums_of_gradients_are_counted(ranks, overlapped):
    for counted, listed in ranks(2, _sums_gradients, overlapped):
        assert counted == listed


def _messages():
    mesh = rank_mesh((2,), ("tp",))
    x = sw.distribute_tensor(torch.ones(2048, 2048), mesh, [sw.Shard(0)])
    with warnings.catch_warnings(record=True) as caught, CommDebugMode() as counted, sw.trace() as t:
        warnings.simplefilter("always")
        for _ in range(2):
            x.redistribute({"tp": sw.Shard(1)})
    said = [str(w.message) for w in caught if "sw.trace()" in str(w.message)]
    return counted.get_total_counts(), [event.op for event in t.collectives], said


def test_messages_that_comm_debug_mode_does_not_count_are_said_once(ranks):
    for counted, listed, said in ranks(2, _messages, fresh=True):
        assert (counted, listed) == (0, ["send_recv"] * 2)
        assert len(said) == 1


def test_our_class_is_torchs_by_comparison_only():
    ours, torchs = sw.DTensor, torch.distributed.tensor.DTensor
    assert ours == torchs
    assert torchs == ours
    assert ours is not torchs
    assert ours not in {torchs: 1}
    assert ours != torch.Tensor

    class Special(sw.DTensor):
        """A user's own."""

    assert Special == torchs
    assert Special != ours

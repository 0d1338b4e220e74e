"""What asks a distributed tensor for memory: a program's own collectives, other processes and libraries."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardwright as sw
from shardwright.errors import RuleError
from shardwright.parallel import parallelize_tensor
from shardwright.testing import rank_mesh

_CALLS = {
    "all_reduce": dist.all_reduce,
    "broadcast": lambda x: dist.broadcast(x, 0),
    "reduce": lambda x: dist.reduce(x, 0),
    "all_gather": lambda x: dist.all_gather([torch.empty_like(x), torch.empty_like(x)], x),
    "reduce_scatter": lambda x: dist.reduce_scatter(x, [torch.empty_like(x), torch.empty_like(x)]),
    "all_to_all": lambda x: dist.all_to_all_single(x, x.clone()),
    "send": lambda x: dist.send(x, 1 - dist.get_rank()),
    "recv": lambda x: dist.recv(x, 1 - dist.get_rank()),
}


def _called(name, placement, block):
    """Each of these did nothing to what it was given, or left other values on each rank, in silence."""
    mesh = rank_mesh((2,), ("x",))
    x = sw.DTensor.from_local(torch.arange(2.0), mesh, [placement])
    with sw.trace() as seen, block(mesh) if block else sw.trace():
        with pytest.raises(RuleError, match="a DTensor is one tensor of all ranks"):
            _CALLS[name](x)
        assert torch.equal(x.to_local(), torch.arange(2.0))
    assert not seen.collectives


@pytest.mark.parametrize("name", _CALLS)
def test_collectives_by_hand_are_refused(ranks, name):
    for placement in (sw.Shard(0), sw.Replicate(), sw.Partial("sum")):
        ranks(2, _called, name, placement, None)
    ranks(2, _called, name, sw.Replicate(), sw.spmd)


def _exported():
    mesh = rank_mesh((2,), ("x",))
    values = torch.arange(8.0)
    for placement in (sw.Shard(0), sw.Replicate(), sw.Partial("sum")):
        x = sw.distribute_tensor(values, mesh, [placement])
        assert np.from_dlpack(x).tolist() == values.tolist()
        assert (torch.from_dlpack(x) + 1).tolist() == (values + 1).tolist()


def test_other_libraries_read_the_whole_value(ranks):
    """They read memory at no address: numbers that nobody wrote, or the end of the process."""
    ranks(2, _exported)


def _shared():
    mesh = rank_mesh((2,), ("x",))
    x = sw.distribute_tensor(torch.arange(4.0), mesh, [sw.Shard(0)])
    assert not x.is_shared()
    assert x.share_memory_() is x
    assert x.is_shared()
    assert torch.equal(x.full_tensor(), torch.arange(4.0))
    module = sw.distribute_module(nn.Linear(3, 2), mesh)
    weight = module.weight
    assert module.share_memory().weight is weight
    assert weight.is_shared()


def test_parts_lie_in_shared_memory(ranks):
    """It ended the process."""
    ranks(2, _shared)


def _across():
    """Ranks of the other axis hold the same parts: sums and copies of these are those of the tensor."""
    mesh, rank = rank_mesh((2, 2), ("dp", "tp")), dist.get_rank() // 2
    values = torch.arange(6.0).view(3, 2)
    x = sw.distribute_tensor(values + rank, mesh["tp"], [sw.Shard(0)], src_data_rank=None)
    version = x._version
    group = mesh["dp"].get_group()
    dist.all_reduce(x, group=group)
    assert torch.equal(x.full_tensor(), 2 * values + 1)
    assert x._version > version
    y = sw.distribute_tensor(values + rank, mesh["tp"], [sw.Shard(1)], src_data_rank=None)
    dist.broadcast(y, dist.get_rank() % 2, group=group)
    assert torch.equal(y.full_tensor(), values)
    for refused, of in ((y, mesh["tp"].get_group()), (y, None)):
        with pytest.raises(RuleError, match="a DTensor is one tensor of all ranks"):
            dist.all_reduce(refused, group=of)
    pending = sw.DTensor.from_local(values, mesh["tp"], [sw.Partial("sum")])
    with pytest.raises(RuleError, match="a DTensor is one tensor of all ranks"):
        dist.all_reduce(pending, group=group)


def test_sums_of_the_same_parts_are_sums(ranks):
    ranks(4, _across)


def _beside_torchs_copies():
    """Copies that began differently never became one model: what was broadcast was lost."""
    mesh, rank = rank_mesh((2, 2), ("dp", "tp")), dist.get_rank() // 2
    torch.manual_seed(0)
    alone, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)), torch.randn(4, 4)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    parallelize_tensor(model, mesh["tp"], {"0": "colwise", "2": "rowwise"})
    copies = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, copies)]
    for _ in range(2):
        alone(x).square().mean().backward()
        with sw.spmd(mesh["tp"]):
            copies(x[2 * rank : 2 * rank + 2]).square().mean().backward()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_torchs_data_parallel_keeps_copies_of_models_that_are_cut(ranks):
    ranks(4, _beside_torchs_copies)

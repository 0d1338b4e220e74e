"""What torch's own placements and `fully_shard` hand over, on real ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import distribute_tensor as torch_distribute
from torch.distributed.tensor.placement_types import _StridedShard

import shardwright as sw
from shardwright.testing import rank_mesh


def mesh_of(*sizes):
    return rank_mesh(sizes, ("dp", "tp")[: len(sizes)])


def numbered(rows, columns=2):
    return torch.arange(1.0, 1 + rows * columns).reshape(rows, columns)


def torchs_placements_everywhere():
    """Every way in takes torch's objects, and means what torch means by them."""
    mesh, full = mesh_of(3, 2), numbered(12)
    strided = [_StridedShard(0, split_factor=2), TorchShard(0)]
    for placements in (strided, [TorchShard(1), TorchReplicate()], [TorchReplicate(), TorchPartial()]):
        ours = sw.distribute_tensor(full, mesh, placements)
        theirs = torch_distribute(full, mesh, placements)
        terms = placements[1] == TorchPartial()  # of a sum there are many; torch makes others than we do
        assert terms or torch.equal(ours.to_local(), theirs.to_local()), placements
        assert torch.equal(ours.redistribute(mesh, [TorchShard(0), TorchReplicate()]).full_tensor(), full)
        there = sw.distribute_tensor(full, mesh, {"dp": sw.ZigZag(0)}).redistribute(mesh, placements)
        assert terms or torch.equal(there.to_local(), ours.to_local()), placements
        assert torch.equal(there.full_tensor(), full), placements
        local = sw.DTensor.from_local(theirs.to_local(), mesh, placements, shape=full.shape, stride=(2, 1))
        assert torch.equal(local.full_tensor(), full), placements
        ones = sw.ones(12, 2, device_mesh=mesh, placements=[TorchShard(0)] * 2)
        assert torch.equal((ones * theirs).full_tensor(), full), placements
        assert sw.Layout(mesh, placements, full.shape, dtype=full.dtype) == sw.layout_of(ours)


def strided_shards_of_seven_rows():
    """7 rows, tp 2, dp 3: a strided shard and the order tp, dp hold different rows; neither is the other."""
    mesh, full = mesh_of(3, 2), numbered(7)
    strided = [_StridedShard(0, split_factor=2), TorchShard(0)]
    ours = sw.distribute_tensor(full, mesh, strided)
    assert torch.equal(ours.full_tensor(), full)
    tp_first = ours.redistribute(mesh, sw.from_partition_spec(mesh, (("tp", "dp"), None)))
    assert sw.layout_of(tp_first) != sw.layout_of(ours)
    assert torch.equal(tp_first.full_tensor(), full)
    return sw.layout_of(ours), sw.layout_of(tp_first)


class Weights(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(bias)


def fully_sharded(rows, placement):
    """`fully_shard` over parameters that tp placed: torch's class comes back, ours converts without bytes."""
    from shardwright.parallel import parallelize_fsdp

    mesh, full = mesh_of(3, 2), numbered(rows)
    model = Weights(
        sw.distribute_tensor(full, mesh["tp"], [placement]),
        sw.distribute_tensor(full, mesh["tp"], [sw.Replicate()]),
    )
    parallelize_fsdp(model, mesh["dp"])
    with sw.trace() as trace:
        layouts = {name: sw.layout_of(p) for name, p in model.named_parameters()}
    assert not trace.collectives
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, TorchDTensor)
        assert torch.equal((parameter * 1).full_tensor(), full), (name, layouts[name])
    assert layouts["weight"].placements[1] == placement
    return str(layouts["weight"])

"""Parameters that are joined before they meet data, and again where checkpointing recomputes."""

import copy

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.grads import GradientSynchronizer
from shardwright.parallel import parallelize_replicate
from shardwright.testing.meshes import rank_mesh


class _Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 5), nn.Linear(4, 7)

    def forward(self, x):
        weight = torch.cat([self.left.weight, self.right.weight])
        return functional.linear(x, weight, torch.cat([self.left.bias, self.right.bias])).tanh()


def _gradients():
    mesh = rank_mesh((2, 1), ("dp", "tp"))
    torch.manual_seed(0)
    one, x = _Joined(), torch.randn(6, 4)
    ours = copy.deepcopy(one)
    sw.distribute_module(ours, mesh["tp"], {"left.weight": {"tp": sw.Shard(0)}})
    parallelize_replicate(ours, mesh["dp"])
    one(x).square().sum().backward()
    rows = x.chunk(2)[mesh.get_local_rank("dp")]
    with sw.spmd(mesh["tp"]):
        checkpoint(ours, rows, use_reentrant=False).square().sum().backward()
    GradientSynchronizer(ours).synchronize()
    for name, p in one.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad.full_tensor(), p.grad)


def test_a_recomputed_join_keeps_the_local_use_of_its_parameters(ranks):
    ranks(2, _gradients)

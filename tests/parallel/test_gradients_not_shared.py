"""Gradients of parameters that compute locally have storage of their own, as torch's have."""

import copy

import pytest
import torch
from torch import nn

from shardwright.parallel import parallelize_replicate
from shardwright.testing.meshes import rank_mesh

X = torch.arange(8.0)
USES = {
    "a sum that hands both the same gradient": lambda m: (X + m.a + m.b) * X,
    "a gradient that is one expanded number": lambda m: (X + m.a) * 1 + m.b,
    "a view before the local use": lambda m: m.a.view(8) * X + m.b.view(8) * X,
}


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))


def _accumulate(use):
    plain = Two()
    model = parallelize_replicate(copy.deepcopy(plain), rank_mesh((2,), ("dp",)))
    for _ in range(2):
        USES[use](plain).sum().backward()
        USES[use](model).sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad * 2)
    locals_ = [p.grad._local_tensor for p in model.parameters()]
    assert len({local.data_ptr() for local in locals_}) == 2
    assert all(local.is_contiguous() for local in locals_)


@pytest.mark.parametrize("use", USES)
def test_a_second_backward_adds_to_each_parameter_alone(ranks, use):
    ranks(2, _accumulate, use)

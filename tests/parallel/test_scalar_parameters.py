"""A parameter without dims is refused by name under fsdp, before anything is changed, and replicates well."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright.errors import ParallelError
from shardwright.parallel import parallelize_fsdp, parallelize_replicate
from shardwright.testing import rank_mesh


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.inner(x) * self.scale


def _fsdp() -> None:
    mesh = rank_mesh((2,), ("shard",))
    model = Scaled()
    with pytest.raises(ParallelError, match=r"^scale: .*without dims.*ignored_params"):
        parallelize_fsdp(model, mesh)
    assert type(model.scale) is nn.Parameter
    assert type(model.inner.weight) is nn.Parameter
    parallelize_fsdp(model, mesh, ignored_params={model.scale})
    model(torch.ones(2, 4)).sum().backward()
    assert model.inner.weight.grad.shape == (4, 4)


def test_fsdp_refuses_a_scalar_by_name(ranks):
    ranks(2, _fsdp)


def _replicate() -> None:
    torch.manual_seed(0)
    model, x = Scaled(), torch.ones(2, 4)
    model(2 * x).sum().backward()
    wanted = model.scale.grad.clone()
    model.zero_grad()
    parallelize_replicate(model, rank_mesh((2,), ("dp",)))
    model(2 * x).sum().backward()
    torch.testing.assert_close(model.scale.grad.full_tensor(), 2 * wanted)


def test_replicate_takes_a_scalar(ranks):
    ranks(2, _replicate)

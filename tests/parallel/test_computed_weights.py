"""Weights that are computed from placed parameters: a backward sends nothing, so a rank may have none."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwright as sw
from shardwright.grads import GradientSynchronizer
from shardwright.parallel import parallelize_replicate
from shardwright.testing.meshes import rank_mesh


def _solved(triangle, right):
    lower = triangle.tril() + 3 * torch.eye(4)
    return torch.linalg.solve_triangular(lower, right, upper=False)


def _without_a_column(one, two):
    return one.index_fill(1, torch.tensor([1]), 0.0) + two.scatter(1, torch.zeros(4, 1).long(), 0.0)


def _pooled(one, two):
    both = torch.stack([one, two])
    pooled = functional.avg_pool2d(both, 2) + functional.max_pool2d(both, 2)
    return functional.interpolate(pooled[None], scale_factor=2)[0].sum(0)


# Two parameters [4, 4] -> the weight of a linear layer.
COMPUTED = {
    "merged": lambda one, two: one + two @ two,
    "joined": lambda one, two: torch.cat([one[:2], two[2:]]),
    "summed": lambda one, two: torch.stack([one, two]).square().sum(0),
    "normed": lambda one, two: functional.normalize(one, dim=1) * two.norm(),
    "weight norm": lambda one, two: torch._weight_norm(one, two[:, :1], 0),
    "solved": _solved,
    "zeros written": _without_a_column,
    "pooled": _pooled,
    "chosen": lambda one, two: torch.where(one > 0, two, one[:1]),
}


class _Computed(nn.Module):
    def __init__(self, name):
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
        self.computed = COMPUTED[name]

    def forward(self, x):
        return functional.linear(x, self.computed(self.one, self.two))


def _idle(name):
    mesh = rank_mesh((2,), ("dp",))
    x = torch.arange(12.0).view(3, 4) / 12
    plain, model = _Computed(name), _Computed(name)
    plain(x).square().sum().backward()
    parallelize_replicate(model, mesh)
    if mesh.get_local_rank() == 0:  # the other has no rows, and does not run
        loss = model(x).square().sum()
        with sw.trace() as trace:
            loss.backward()
        assert not trace.collectives, trace.collectives
    GradientSynchronizer(model).synchronize()
    for (key, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda m, k=key: f"{name} {k}: {m}")


def _idle_beside_an_axis(name):
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    x = torch.arange(12.0).view(3, 4) / 12
    plain, model = _Computed(name), _Computed(name)
    plain(x).square().sum().backward()
    sw.distribute_module(model, mesh["tp"], {"one": {"tp": sw.Shard(0)}, "two": {"tp": sw.Shard(1)}})
    parallelize_replicate(model, mesh["dp"])
    if mesh.get_local_rank("dp") == 0:
        with sw.spmd(mesh["tp"]):
            model(x).square().sum().backward()
    GradientSynchronizer(model).synchronize()
    for (key, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad.placements == p.placements
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda m, k=key: f"{name} {k}: {m}")


@pytest.mark.parametrize("name", ["merged", "joined", "summed", "solved"])
def test_nor_where_gradients_lie_otherwise_than_their_parameters(name, ranks):
    ranks(4, _idle_beside_an_axis, name, timeout=60)


@pytest.mark.parametrize("name", COMPUTED)
def test_a_rank_without_rows_need_not_run(name, ranks):
    ranks(2, _idle, name, timeout=60)


def _numbers_of_ranks():
    """A term of parameters times this rank's rows, beside one of the rows; on another axis they are cut."""
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    scale = nn.Module()
    scale.weight = nn.Parameter(torch.arange(3.0))
    sw.distribute_module(scale, mesh["tp"], {"weight": {"tp": sw.Shard(0)}})
    parallelize_replicate(scale, mesh["dp"])
    rows = (5, 3)[mesh.get_local_rank("dp")]
    with sw.spmd(mesh["tp"]), sw.trace() as seen:
        ((scale.weight * torch.full((3,), 10.0 * rows)).sum() + (scale.weight * rows).sum()).backward()
    torch.testing.assert_close(scale.weight.grad.full_tensor(), torch.full((3,), 88.0))
    assert all(sent.axis != "dp" for sent in seen.collectives)


def test_numbers_of_ranks_meet_the_terms_of_ranks(ranks):
    """Terms had been finished first, and then multiplied by one rank's number; 90 came of it."""
    ranks(4, _numbers_of_ranks)

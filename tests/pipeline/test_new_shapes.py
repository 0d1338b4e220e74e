"""Shapes that are new, to all data ranks or to some, while gradients of earlier steps wait for more."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright.errors import ParallelError
from shardwright.moe import MoELayer
from shardwright.parallel import (
    Pipeline,
    parallelize_batch_norm,
    parallelize_expert_parallel,
    parallelize_fsdp,
    parallelize_pipeline,
    parallelize_replicate,
)
from shardwright.testing import rank_mesh
from tests.pipeline.ranks import error, whole

WIDTH = 4


class _Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu() + x
        return x


def _summed(out, _=None):
    return out.square().sum()


def _placed(model, mesh, experts):
    if experts:
        parallelize_expert_parallel(model, mesh["dp"], "dp")
    parallelize_pipeline(model, mesh["pp"], ["layers.2"])
    place = parallelize_replicate if experts else parallelize_fsdp
    for layer in model.layers:
        if isinstance(layer, nn.Linear):
            place(layer, mesh["dp"])
    if not experts:
        parallelize_fsdp(model, mesh["dp"])


def _worst(batches, look=False, knows_data=True, experts=False):
    """The largest error of a gradient after several steps; batches: the rows of both data ranks, by step."""
    torch.manual_seed(0)
    model = _Layers()
    if experts:
        model.layers[1] = MoELayer(WIDTH, 8, 2, 1, normalize=False)
    alone, mesh = copy.deepcopy(model), rank_mesh((2, 2), ("pp", "dp"))
    _placed(model, mesh, experts)
    pipeline = Pipeline(model, _summed, micro_batches=2, data=mesh["dp"] if knows_data else None)
    for seed, rows in enumerate(batches):
        x = torch.randn(sum(rows), WIDTH, generator=torch.Generator().manual_seed(seed))
        if look:
            pipeline.evaluate(x)
        _summed(alone(x)).backward()
        pipeline.step(x.split(rows)[mesh["dp"].get_local_rank()])
    return max(error(whole(p.grad), alone.get_parameter(n).grad) for n, p in model.named_parameters())


@pytest.mark.parametrize("look", [False, True])
def test_gradients_of_sharded_stages_stay_where_new_shapes_come(ranks, look):
    assert max(ranks(4, _worst, [(2, 2), (4, 4), (2, 2)], look, timeout=30)) < 1e-5


@pytest.mark.parametrize(("knows_data", "experts"), [(True, False), (False, False), (False, True)])
def test_shapes_that_are_new_to_one_data_rank_are_learned_by_all(ranks, knows_data, experts):
    """Its peers gather what is sharded and exchange tokens with it; they would have waited for each other."""
    batches = [(2, 2), (2, 4), (6, 4), (2, 4)]
    assert max(ranks(4, _worst, batches, False, knows_data, experts, timeout=30)) < 1e-5


def _one_cannot_begin(knows_data):
    mesh = rank_mesh((2, 2), ("pp", "dp"))
    model = _Layers()
    _placed(model, mesh, experts=False)
    pipeline = Pipeline(model, _summed, micro_batches=2, data=mesh["dp"] if knows_data else None)
    with pytest.raises(ParallelError) as caught:
        pipeline.step(torch.zeros(3 + mesh["dp"].get_local_rank(), WIDTH))
    assert all(p.grad is None for p in model.parameters())
    return str(caught.value)


@pytest.mark.parametrize("knows_data", [True, False])
def test_what_one_data_rank_cannot_begin_is_told_to_all(ranks, knows_data):
    texts = ranks(4, _one_cannot_begin, knows_data, timeout=30)
    assert all("do not divide a batch of 3 rows" in text for text in texts[::2])
    assert texts[1::2] == ["pipeline: a step failed on ranks of other data, which say why"] * 2


def _new_dtype(dtype):
    """The inputs are numbers of tokens: nothing but the parameters tells of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    alone = copy.deepcopy(model).to(dtype)
    parallelize_pipeline(model, rank_mesh((2,), ("pp",)), ["2"])
    pipeline = Pipeline(model, _summed, micro_batches=2)
    tokens = torch.arange(8).view(4, 2)
    pipeline.step(tokens)
    model.to(dtype)
    found, wanted = pipeline.step(tokens), sum(_summed(alone(rows)) for rows in tokens.chunk(2))
    torch.testing.assert_close(found.to(dtype), wanted.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_dtype_is_learned_anew(ranks, dtype):
    ranks(2, _new_dtype, dtype, timeout=30)


def _batch_norm_over_other_rows():
    """Ranks of other data meet other shapes; the statistics of a stage are of all of them."""
    mesh = rank_mesh((2, 2), ("pp", "dp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
    alone = copy.deepcopy(model)
    parallelize_batch_norm(model, mesh["dp"])
    parallelize_pipeline(model, mesh["pp"], ["2"])
    parallelize_replicate(model, mesh["dp"])
    pipeline = Pipeline(model, lambda out, y: (out - y).square().sum(), micro_batches=1, schedule="gpipe")
    rank = mesh["dp"].get_local_rank()
    for step, rows in enumerate([(4, 4), (4, 6), (6, 4)]):
        seeded = torch.Generator().manual_seed(step)
        x, y = torch.randn(sum(rows), 4, generator=seeded), torch.randn(sum(rows), 2, generator=seeded)
        mine = slice(rank * rows[0], rank * rows[0] + rows[rank])
        loss = pipeline.step(x[mine], target=y[mine])
        dist.all_reduce(loss, group=mesh["dp"].get_group())
        torch.testing.assert_close(loss, (alone(x) - y).square().sum().detach(), rtol=1e-4, atol=1e-5)


def test_a_new_shape_of_one_data_rank_is_learned_beside_a_batch_norm(ranks):
    """It was learned alone, in a forward that sums over the other one too."""
    ranks(4, _batch_norm_over_other_rows, timeout=60)

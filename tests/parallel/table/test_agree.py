"""What ranks must mean alike, and what a cut model without memory is told."""

import functools

import pytest
import torch
from torch import nn

from shardwright.errors import ParallelError
from shardwright.parallel import parallelize, parallelize_pipeline
from tests.parallel.randomness.models import made

from .worlds import context


def _first(x, mesh=None, *, dim=0):
    return None


def _options(kind):
    at = context(data_parallel_shard=2)
    other = at.rank == 1
    options = {
        "value": {"reshard_after_forward": other},
        "function": {"shard_placement_fn": functools.partial(_first, dim=int(other))},
        "alike": {"shard_placement_fn": lambda _: None},
    }[kind]
    try:
        parallelize(made(), at, {"": {"fsdp": options}}, report=None)
    except ParallelError as error:
        return str(error)


@pytest.mark.parametrize("kind", ["value", "function", "alike"])
def test_options_of_other_values_are_other_tables(ranks, kind):
    for text in ranks(2, _options, kind):
        assert text is None if kind == "alike" else "ranks 0 and 1 have other tables" in text


def _cut():
    at = context(pipeline_parallel=2, data_parallel_shard=2)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parallelize_pipeline(model, at.mesh_for("regular")["pp"], ["1"])
    with pytest.raises(ParallelError, match="made on the meta device and cut into stages"):
        parallelize(model, at, "fsdp", report=None)
    assert all(p.is_meta for p in model.parameters())

    def init(module):
        for p in module.parameters():
            nn.init.ones_(p)

    parallelize(model, at, "fsdp", init=init, report=None)
    return [p.full_tensor().sum().item() for p in model.parameters()]


def test_a_cut_model_without_memory_takes_its_weights_from_a_function(ranks):
    assert ranks(4, _cut) == [[16.0, 4.0]] * 4

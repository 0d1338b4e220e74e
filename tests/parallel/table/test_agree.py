"""What ranks must mean alike, and what a cut model without memory is told."""

import functools

import pytest
import torch
from torch import nn

from shardwright.errors import ParallelError
from shardwright.moe import MoELayer
from shardwright.parallel import (
    parallelize,
    parallelize_expert_parallel,
    parallelize_pipeline,
    parallelize_tensor,
)
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


def _placed_before(strategy):
    """What a table has no row for, or need not have, was placed by calls; a table places the rest."""
    degrees = {"tensor": "tensor_parallel", "expert": "data_parallel_shard"}
    at = context(pipeline_parallel=2, **{degrees[strategy]: 2}, expert_parallel=1 + (strategy == "expert"))
    regular, experts = at.mesh_for("regular"), at.mesh_for("expert")[["ep_replicate", "ep_shard"]]
    said = []
    for early in (True, False):
        model = nn.Sequential(MoELayer(4, 4, 2, 1), nn.Linear(4, 4), nn.Linear(4, 4))
        if early and strategy == "expert":
            parallelize_expert_parallel(model, experts)
        parallelize_pipeline(model, regular["pp"], ["2"])
        for layer in model[1:] if early and strategy == "tensor" else ():
            parallelize_tensor(layer, regular["tp"], "colwise")
        try:
            parallelize(model, at, {"": "replicate"}, report=None)
            said.append("")
        except ParallelError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("strategy", ["tensor", "expert"])
def test_an_axis_that_a_call_has_used_needs_no_row(ranks, strategy):
    stages = ranks(4, _placed_before, strategy)
    assert [said[0] for said in stages] == [""] * 4
    has_none = "and no row" in stages[0][1], "and no row" in stages[3][1]
    assert has_none == (True, strategy == "tensor")  # a stage without experts has none to spread

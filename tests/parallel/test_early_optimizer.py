"""An optimizer made before a strategy would update tensors that no module has: its first step says so."""

import pytest
import torch
from torch import nn

from shardwright.errors import ParallelError
from shardwright.parallel import (
    parallelize_context,
    parallelize_fsdp,
    parallelize_hsdp,
    parallelize_pipeline,
    parallelize_replicate,
    parallelize_tensor,
)
from shardwright.placement import Shard
from shardwright.testing import rank_mesh

STRATEGIES = {
    "replicate": parallelize_replicate,
    "fsdp": parallelize_fsdp,
    "hsdp": lambda m, mesh: parallelize_hsdp(m, mesh, shard_dim="x"),
    "tensor by placements": lambda m, mesh: parallelize_tensor(m, mesh, {"0.weight": {"x": Shard(0)}}),
    "tensor by words": lambda m, mesh: parallelize_tensor(m, mesh, {"0": "colwise", "2": "rowwise"}),
    "context": parallelize_context,
    "pipeline": lambda m, mesh: parallelize_pipeline(m, mesh, ["2"]),
}


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def _first_step(name, foreach):
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach)
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    STRATEGIES[name](model, rank_mesh((2,), ("x",)))
    with pytest.raises(ParallelError) as caught:
        optimizer.step()
    assert all(map(torch.equal, before, optimizer.param_groups[0]["params"]))
    torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach).step()  # one made afterwards
    return str(caught.value)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", STRATEGIES)
def test_its_first_step_names_what_it_would_leave_out(ranks, name, foreach):
    for text in ranks(2, _first_step, name, foreach):
        assert text.startswith("AdamW.step(): ")
        assert "after this optimizer was made" in text
        assert ".weight" in text


def _shared():
    """A part that was never placed still computes with the old parameter: that is no mistake."""
    first, second = _model(), _model()
    second[0].weight = first[0].weight
    optimizer = torch.optim.SGD([second[0].weight], lr=0.1)
    parallelize_replicate(first, rank_mesh((2,), ("x",)))
    second(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_a_parameter_that_another_part_still_trains_is_let_through(ranks):
    ranks(2, _shared)

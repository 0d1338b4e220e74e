"""Experts that live on the ranks that cut the sequence: loss, gradients and steps of one device."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from shardwright.context import BATCH_DOMAIN, EXPERT_DOMAIN, REGULAR_DOMAIN
from shardwright.grads import GradientSynchronizer, global_mean
from shardwright.parallel import (
    parallelize,
    parallelize_context,
    parallelize_expert_parallel,
    parallelize_fsdp,
)
from tests.tiers import one_in

from .experts_on_context import LENGTH, batch, made
from .worlds import context

TENSOR = {"layers.*.mix": "colwise", "layers.*.out": "rowwise"}
DEGREES = {
    "cp": ({"context_parallel_shard": 2, "expert_parallel": 2}, {"": ["expert", "context", "replicate"]}),
    "one copy": ({"context_parallel_shard": 2}, {"": ["expert", "context", "replicate"]}),
    "dp cp": (
        {"data_parallel_shard": 2, "context_parallel_shard": 2, "expert_parallel": 2},
        {"": ["expert", "context", "fsdp"], "layers.*": "fsdp"},
    ),
    "ep over both": (
        {"data_parallel_shard": 2, "context_parallel_shard": 2, "expert_parallel": 4},
        {"": ["expert", "context", "replicate"]},
    ),
    "cp tp": (
        {"tensor_parallel": 2, "context_parallel_shard": 2, "expert_parallel": 2},
        {"": ["expert", "context", "replicate"], "layers.*.norm": {"tensor": "replicate"}},
    ),
}


def _differences(model, one):
    found = []
    for name, p in model.named_parameters():
        wanted = one.get_parameter(name).grad
        got = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        error = float((got - wanted).abs().max() / wanted.abs().max())
        if not error < 1e-4:
            found.append((name, error))
    return found


def _in_units_of_one_rank(model, at):
    """A table refuses axes of one rank; calls take them, and then `fully_shard` gathers the experts too."""
    parallelize_expert_parallel(model, at.mesh_for(EXPERT_DOMAIN)["ep_replicate", "ep_shard"])
    parallelize_context(model, at.mesh_for(REGULAR_DOMAIN)["cp_shard"])
    for part in (*model.layers, model):
        parallelize_fsdp(part, at.mesh_for(REGULAR_DOMAIN)["dp_replicate", "dp_shard"])


def _train(degrees, plan, recompute, shared, doubled=False):
    at = context(**degrees)
    form = {"shared": shared, "scored": plan is not None}
    one, model = made(**form), made(**form, recompute=recompute)
    if plan is None:
        _in_units_of_one_rank(model, at)
    else:
        parallelize(model, at, plan, report=None)
    dp = at.mesh_for(BATCH_DOMAIN)["dp"]
    tokens = batch()
    mine = tokens[dp.get_local_rank() :: dp.size()]
    expected = one(tokens, tokens) / (tokens.shape[0] * (LENGTH - 1))
    expected.backward()
    loss = global_mean(model(mine, mine), mine.shape[0] * (LENGTH - 1), dp)
    loss.backward()
    if doubled:
        model.layers[0].moe.experts.up.weight.grad.mul_(2)
    GradientSynchronizer(model).synchronize()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-5, atol=0)
    return _differences(model, one)


# Each mesh once by `make test`, recomputed or with a shared expert in turn.
FORMS = [(False, True), (True, False)]
CASES = [(name, *form) for at, name in enumerate(DEGREES) for form in (FORMS[at % 2], FORMS[1 - at % 2])]


@pytest.mark.parametrize(("name", "recompute", "shared"), one_in(4, CASES))
def test_experts_on_context_ranks_train_as_one_device(ranks, name, recompute, shared):
    degrees, plan = DEGREES[name]
    if "tensor_parallel" in degrees:
        plan = {**TENSOR, "": plan[""]}
    world = torch.tensor([n for d, n in degrees.items() if d != "expert_parallel"]).prod()
    assert ranks(int(world), _train, degrees, plan, recompute, shared) == [[]] * int(world)


def test_experts_in_sharded_units_of_one_rank_keep_to_their_tokens(ranks):
    assert ranks(2, _train, DEGREES["cp"][0], None, False, True) == [[], []]


def test_a_gradient_of_an_expert_twice_as_large_is_seen(ranks):
    degrees, plan = DEGREES["cp"]
    found = ranks(2, _train, degrees, plan, False, True, True)
    assert all(name.endswith("experts.up.weight") for names in found for name, _ in names)
    assert found[0]

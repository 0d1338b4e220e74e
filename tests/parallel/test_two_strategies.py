"""Tensor parallelism and a data-parallel strategy on one model: every gradient is that of one device."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.parallel import parallelize_fsdp, parallelize_hsdp, parallelize_replicate, parallelize_tensor
from shardwright.testing.meshes import rank_mesh
from tests.tiers import all_but, only

from .residual import PLAN, WIDTH, Residual, one_device, residual, rows, run

DATA = {
    "replicate": parallelize_replicate,
    "fsdp": parallelize_fsdp,
    "hsdp": lambda model, dp: parallelize_hsdp(model, dp, shard_dim="dp"),
}
COUNTS = {"even": (2, 2), "uneven": (1, 3), "a rank without rows": (3, 0)}


def _cut_over_tp(data, counts, *, recompute=False, passes=1, static=False):
    mesh = rank_mesh((len(counts), 2 if len(counts) == 1 else 4 // len(counts)), ("dp", "tp"))
    model = residual()
    x, parts = rows(counts)
    wanted = one_device(model, x)
    sw.distribute_module(model, mesh["tp"], PLAN)
    DATA[data](model, mesh["dp"])
    mine = parts[mesh.get_local_rank("dp")]

    def backward():
        with sw.spmd(mesh["tp"]):
            out = checkpoint(model, mine, use_reentrant=False) if recompute else model(mine)
            out.square().sum().backward()

    run(model, backward, wanted, passes, static)


@pytest.mark.parametrize(
    ("data", "counts"), only([("fsdp", "a rank without rows"), ("hsdp", "even")], product(DATA, COUNTS))
)
def test_every_gradient_of_a_cut_model_is_one_devices(ranks, data, counts):
    ranks(4, _cut_over_tp, data, COUNTS[counts])


def test_on_a_data_axis_of_one_rank_too(ranks):
    ranks(2, _cut_over_tp, "replicate", (3,))


@pytest.mark.parametrize("data", only(["fsdp"], DATA))
def test_two_backwards_before_one_sum(ranks, data):
    ranks(4, _cut_over_tp, data, (1, 3), recompute=True, passes=2)


def test_no_rank_waits_when_all_promise_the_same_gradients(ranks):
    """The layout of a gradient says nothing about the rows of its rank, so nobody has to agree on it."""
    ranks(4, _cut_over_tp, "replicate", (3, 0), static=True)


def _embedded():
    """Tokens in, so that torch's styles can cut the sequence."""
    torch.manual_seed(0)
    blocks = nn.Embedding(11, WIDTH), Residual(), Residual(), nn.RMSNorm(WIDTH)
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 6), nn.Tanh())


def _sequence_plan(negative):
    """torchtitan's: the sequence is cut between the cut layers, and gathered without waiting before them."""
    dim = -2 if negative else 1
    plan = {
        "0": RowwiseParallel(input_layouts=sw.Replicate(), output_layouts=sw.Shard(dim)),
        "3": SequenceParallel(),
        "4": ColwiseParallel(input_layouts=sw.Shard(dim), output_layouts=sw.Replicate()),
    }
    for block in ("1", "2"):
        plan |= {
            block: PrepareModuleInput(input_layouts=sw.Shard(dim), desired_input_layouts=sw.Shard(dim)),
            f"{block}.norm": SequenceParallel(),
            f"{block}.up": ColwiseParallel(input_layouts=sw.Shard(dim)),
            f"{block}.down": RowwiseParallel(output_layouts=sw.Shard(dim), use_local_output=False),
        }
    return plan


def _sequence_parallel(data, counts, negative):
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    model = _embedded()
    tokens = torch.randint(11, (sum(counts), 4), generator=torch.Generator().manual_seed(1))
    wanted = one_device(model, tokens)
    parallelize_tensor(model, mesh["tp"], _sequence_plan(negative))
    DATA[data](model, mesh["dp"])
    mine = tokens.split(counts)[mesh.get_local_rank("dp")]
    run(model, lambda: model(mine).square().sum().backward(), wanted, static=data == "replicate")


@pytest.mark.parametrize(
    ("data", "counts", "negative"),
    all_but(
        [("replicate", (3, 0), False), ("replicate", (2, 2), True)],
        [
            ("replicate", (1, 3), False),
            ("replicate", (3, 0), False),
            ("replicate", (2, 2), True),
            ("fsdp", (3, 0), False),
        ],
    ),
    ids=["uneven", "a rank without rows", "dims counted from the end", "fsdp, a rank without rows"],
)
def test_the_sequence_parallel_plan_of_torchs_styles(ranks, data, counts, negative):
    ranks(4, _sequence_parallel, data, counts, negative)


def _arrives_later():
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    layer = nn.Linear(4, 6)
    wanted = one_device(layer, torch.cat([torch.ones(4, 4), torch.full((4, 4), 2.0)]))
    sw.distribute_module(layer, mesh["tp"], {"*": {"tp": sw.Shard(0)}})
    parallelize_replicate(layer, mesh["dp"])

    def backward():
        mine = torch.full((4, 4), 1.0 + mesh.get_local_rank("dp"))
        x = sw.distribute_tensor(mine, mesh["tp"], [sw.Shard(0)], src_data_rank=None)
        layer(x.redistribute([sw.Replicate()], async_op=True)).square().sum().backward()

    run(layer, backward, wanted)


def test_an_activation_under_way_meets_a_replicated_weight(ranks):
    ranks(4, _arrives_later)

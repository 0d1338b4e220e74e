"""Tensor parallelism and a data-parallel strategy on one model: every gradient is that of one device."""

import pytest
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.parallel import parallelize_fsdp, parallelize_hsdp, parallelize_replicate
from shardwright.testing.meshes import rank_mesh

from .residual import PLAN, one_device, residual, rows, run

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


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("data", DATA)
def test_every_gradient_of_a_cut_model_is_one_devices(ranks, data, counts):
    ranks(4, _cut_over_tp, data, counts)


def test_on_a_data_axis_of_one_rank_too(ranks):
    ranks(2, _cut_over_tp, "replicate", (3,))


@pytest.mark.parametrize("data", DATA)
def test_two_backwards_before_one_sum(ranks, data):
    ranks(4, _cut_over_tp, data, (1, 3), recompute=True, passes=2)


def test_no_rank_waits_when_all_promise_the_same_gradients(ranks):
    """The layout of a gradient says nothing about the rows of its rank, so nobody has to agree on it."""
    ranks(4, _cut_over_tp, "replicate", (3, 0), static=True)

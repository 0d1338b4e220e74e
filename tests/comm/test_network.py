"""All ranks plan for the network that rank 0 was told of."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from shardwright.errors import PlanError
from shardwright.testing import rank_mesh


def told(folder: str) -> tuple[str, int, int]:
    rank = dist.get_rank()
    path = f"{folder}/network.json" if rank == 0 else "no such file"
    try:
        network = sw.use_network(path)
        mesh = rank_mesh((2, 2), ("dp", "tp"))
        full = torch.arange(64.0 * 64).view(64, 64)
        x = sw.distribute_tensor(full, mesh, [sw.Shard(0), sw.Shard(0)], src_data_rank=None)
        assert torch.equal(x.full_tensor(), full)
        plan = sw.plan_redistribution(sw.layout_of(x), sw.layout_of(x).with_placements([sw.Replicate()] * 2))
        return network.to_json(), plan.rounds, plan.slow_bytes
    finally:
        sw.use_network(sw.Network())


def test_every_rank_uses_what_the_first_one_read(ranks, tmp_path):
    network = sw.Network(slow_axes=("dp",), one_round_bytes=4096)
    (tmp_path / "network.json").write_text(network.to_json())
    assert ranks(4, told, str(tmp_path)) == [(network.to_json(), 2, 64 * 64 * 4)] * 2 * 2


def refused() -> str:
    with pytest.raises((PlanError, OSError)) as error:
        sw.use_network("no such file")
    return str(error.value)


def test_a_file_that_is_missing_is_said_on_every_rank(ranks):
    assert len({*ranks(2, refused)}) == 1

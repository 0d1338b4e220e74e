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


def refused(given) -> str:
    with pytest.raises((PlanError, OSError, UnicodeError)) as error:
        sw.use_network(given if dist.get_rank() == 0 else "no such file")
    return str(error.value)


def test_what_is_no_network_is_said_on_every_rank(ranks, tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff")
    for given in ("no such file", str(tmp_path / "bytes"), {"slow_axes": ("dp",)}):
        assert len({*ranks(2, refused, given)}) == 1


def test_one_slow_axis_is_a_name_in_a_tuple():
    for make in (lambda: sw.Network(slow_axes="dp"), lambda: sw.Network.from_json('{"slow_axes": "dp"}')):
        with pytest.raises(PlanError, match="slow_axes are names"):
            make()

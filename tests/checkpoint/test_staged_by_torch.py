"""torch's own asynchronous saving copies our tensors before it returns, whatever their placements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

import shardwright as sw
from shardwright.parallel import parallelize_replicate
from shardwright.testing import rank_mesh

PLACEMENTS = [
    sw.Shard(0),
    sw.Replicate(),
    sw.ZigZag(0),
    sw.Interleaved(1, 2),
    sw.Owner(1),
    sw.Ragged((1, 3), (0, 1)),
]


def _state(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors of every placement, views, a parameter that computes as its local tensor, and one of ours."""
    mesh = rank_mesh((2,), ("dp",))
    placed = [sw.distribute_tensor(x.clone(), mesh, [p], src_data_rank=None) for p in PLACEMENTS]
    local = nn.Linear(6, 9, bias=False)
    local.weight.data.copy_(x)
    parallelize_replicate(local, mesh)
    found = {str(number): one for number, one in enumerate(placed)}
    return {**found, "view": placed[0].t().t(), "parameter": nn.Parameter(placed[2]), "local": local.weight}


@torch.no_grad()
def _saved_while_it_goes_on(path: Path) -> list[str]:
    x, wrong = torch.arange(54.0).reshape(9, 6), []
    state = _state(x)
    saving = dcp.async_save(state, checkpoint_id=path)
    for one in state.values():
        one.zero_()
    saving.result()
    found = {name: torch.full_like(x, -1) for name in state}
    dcp.load(found, checkpoint_id=path)
    wrong += [f"saved {name}" for name, one in found.items() if not torch.equal(one, x)]
    stager, state = StateDictStager(), _state(x)
    for _ in range(2):  # the second time into the memory of the first
        wanted = {name: one.full_tensor().clone() for name, one in state.items()}
        staged = stager.stage(state)
        for one in state.values():
            one.add_(1)
        for name, twin in staged.items():
            assert sw.layout_of(twin) == sw.layout_of(state[name])
            assert twin.device_mesh is state[name].device_mesh
            if not torch.equal(twin.full_tensor(), wanted[name]):
                wrong.append(f"staged {name}")
    return wrong


def test_what_is_written_is_what_was_there_when_saving_began(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    assert ranks(2, _saved_while_it_goes_on, tmp_path / "c") == [[], []]

"""Two things of one name, on two ranks or on one, are refused by that name, or are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardwright.checkpoint import load, read_manifest, save
from shardwright.errors import CheckpointError

Ranks = Callable[..., list[Any]]


def refusal(path: Path, *args: Any, **state: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        save(path, *args, **state)
    return str(error.value)


def on_own_mesh(value: float) -> nn.Module:
    """A weight on this rank's mesh: ranks 0 and 1, or 2 and 3."""
    meshes = [DeviceMesh("cpu", [2 * n, 2 * n + 1], mesh_dim_names=("tp",)) for n in range(2)]
    local = torch.full((2, 3), value + dist.get_rank() % 2)
    model = nn.Module()
    model.w = nn.Parameter(DTensor.from_local(local, meshes[dist.get_rank() // 2], [Shard(0)]))
    return model


def two_stages(path: Path) -> str:
    return refusal(path, on_own_mesh(float(dist.get_rank() // 2)))


def two_replicas(path: Path) -> bool:
    save(path, on_own_mesh(3.0))
    model = on_own_mesh(0.0)
    load(path, model)
    return torch.equal(model.w.to_local(), torch.full((2, 3), 3.0 + dist.get_rank() % 2))


def optimizer_values(path: Path) -> str:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight] = {"same": 1, "mine": dist.get_rank()}
    return refusal(path, model, optimizer)


def test_tensors_of_one_name_on_two_meshes_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(4, two_stages, tmp_path / "c")
    assert len(set(found)) == 1
    assert "model/w is another tensor on the mesh of ranks [0, 1] than on that of [2, 3]" in found[0]


def test_copies_on_two_meshes_are_one_tensor(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(4, two_replicas, tmp_path / "c") == [True] * 4


def test_a_value_of_the_optimizer_that_differs_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(2, optimizer_values, tmp_path / "c")
    assert len(set(found)) == 1
    assert (
        "optimizer/model/weight: the ranks have different values of the optimizer's state (mine)" in found[0]
    )


def test_states_whose_names_become_one_are_refused(tmp_path: Path) -> None:
    twins = {1: torch.Generator(), "1": torch.Generator()}
    assert "s has two states called '1'" in refusal(tmp_path / "c", s=twins)


def test_names_that_become_one_without_a_compiled_part_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model._orig_mod = nn.Linear(2, 2)
    assert "two entries of the model are called 'weight'" in refusal(tmp_path / "c", model)


def test_only_whole_parts_of_names_are_left_out(tmp_path: Path) -> None:
    model = nn.Module()
    model.my_orig_mod = nn.Linear(1, 1)
    assert "model/my_orig_mod.weight" in read_manifest(save(tmp_path / "c", model)).tensors

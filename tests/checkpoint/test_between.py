"""A load between a forward and its backward is an error, as writes of torch's are: no gradients of both."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.checkpoint import load, load_hf, save, save_hf
from shardwright.parallel import parallelize_replicate
from shardwright.testing import rank_mesh

Ranks = Callable[..., list[Any]]


def loaded_between(folder: Path, how: str, placed: str) -> str:
    """What the backward says where another model was loaded since the forward."""
    other, model = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2))
    mesh = rank_mesh((2,), ("tp",))
    for at, one in enumerate((other, model)):
        torch.manual_seed(at)
        for p in one.parameters():
            nn.init.normal_(p)
    save(folder / "own", other)
    save_hf(other, folder / "hf")
    if placed == "replicate":
        parallelize_replicate(model, mesh)
    elif placed == "spmd":
        plan = {"0.weight": {"tp": sw.Shard(0)}, "*": {"tp": sw.Replicate()}}
        model = sw.distribute_module(model, mesh, plan)
    with sw.spmd(mesh) if placed == "spmd" else nullcontext():
        loss = model(torch.ones(2, 4)).square().sum()
        if how == "hf":
            load_hf(model, folder / "hf")
        else:
            load(folder / "own", model, in_place=how == "in place")
        try:
            loss.backward()
        except RuntimeError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("how", ["load", "in place", "hf"])
@pytest.mark.parametrize("placed", ["plain", "replicate", "spmd"])
def test_a_backward_over_a_load_is_an_error(ranks: Ranks, tmp_path: Path, how: str, placed: str) -> None:
    """Of placed parameters it computed with new weights and old activations."""
    for said in ranks(2, loaded_between, tmp_path, how, placed):
        assert "modified" in said, said
        assert "inplace" in said

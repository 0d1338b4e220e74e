"""How a tensor lies in memory is its own affair: what was saved comes back, whatever the strides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwright import DTensor, Ragged, distribute_tensor
from shardwright.checkpoint import load, save
from shardwright.testing import rank_mesh

Ranks = Callable[..., list[Any]]


class Keeper:
    """Anything with a state of its own."""

    def __init__(self, kept: torch.Tensor) -> None:
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


def permuted(value: float) -> DTensor:
    """A DTensor whose local tensor is dense, with its dims in another order."""
    placements = [Ragged((1, 3), dims=(0, 1))]
    whole = torch.arange(160.0).reshape(8, 4, 5) * value
    made = distribute_tensor(whole, rank_mesh((2,), ("dp",)), placements, src_data_rank=None)
    local = made._local_tensor.transpose(1, 2).contiguous().transpose(1, 2)
    return DTensor.from_local(local, made.device_mesh, placements, shape=made.shape, stride=made.stride())


def through_optimizer(path: Path) -> tuple[bool, bool]:
    """Save a state, load it into a fresh optimizer: not trivial, and the same."""
    found = []
    for stage in ("save", "load"):
        model = nn.Module()
        model.w = nn.Parameter(permuted(1.0))
        optimizer = torch.optim.Adam(model.parameters())
        if stage == "save":
            optimizer.state[model.w] = {"exp_avg": permuted(2.0)}
            save(path, model, optimizer)
        else:
            load(path, model, optimizer)
        found.append(optimizer.state[model.w]["exp_avg"].to_local())
    return bool(found[0].any()), torch.equal(*found)


def through_object(path: Path) -> bool:
    save(path, keeper=Keeper(permuted(1.0)))
    other = Keeper(permuted(0.0))
    load(path, keeper=other)
    return torch.equal(other.kept.to_local(), permuted(1.0).to_local())  # type: ignore[attr-defined]


def test_new_state_of_a_parameter_with_other_strides_is_loaded(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, through_optimizer, tmp_path / "c") == [(True, True)] * 2


def test_a_kept_tensor_with_other_strides_is_loaded(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, through_object, tmp_path / "c") == [True] * 2


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64])
def test_one_element_of_any_stride_is_saved_and_loaded(
    tmp_path: Path, dtype: torch.dtype, in_place: bool
) -> None:
    """A slice such as `x[:1, 2]` counts as contiguous, and torch views no bytes of it."""
    one = torch.arange(12).reshape(2, 6).to(dtype)[:1, 2]
    save(tmp_path / "c", one=one, value=(1, {"one": [one.clone().as_strided((1,), (4,))]}))
    there, inside = torch.zeros(2, 6, dtype=dtype)[:1, 2], torch.zeros(1, dtype=dtype)
    load(tmp_path / "c", in_place=in_place, one=there, value=(1, {"one": [inside]}))
    assert torch.equal(there, one)
    assert torch.equal(inside, one)

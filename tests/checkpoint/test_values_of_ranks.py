"""Values that each rank has for itself: large tensors in them, and generators of other kinds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright.checkpoint import load, read_manifest, save, verify
from shardwright.errors import CheckpointError

Ranks = Callable[..., list[Any]]


class Ordered:
    """A loader that keeps the order in which it reads, and something that all ranks have."""

    def __init__(self, rank: int, size: int) -> None:
        self.order = torch.arange(size + rank).flip(0) * (rank + 1)
        self.table = torch.arange(size)

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "table": self.table}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.table = state["order"], state["table"]


def own_order(path: Path, size: int) -> int:
    """Each rank's own tensor comes back to it, however large; what all have is stored once."""
    rank = dist.get_rank()
    save(path, loader=Ordered(rank, size))
    other = Ordered(0, 1)
    load(path, loader=other)
    assert torch.equal(other.order, Ordered(rank, size).order)
    assert torch.equal(other.table, torch.arange(size))
    return len(read_manifest(path).tensors)


@pytest.mark.parametrize(("size", "kept"), [(1000, 0), (9000, 3)])
def test_values_of_each_rank_may_be_large(ranks: Ranks, tmp_path: Path, size: int, kept: int) -> None:
    """Tensors of more than 64 KiB had to be the same on all ranks."""
    assert ranks(2, own_order, tmp_path / "c", size) == [kept, kept]
    assert verify(tmp_path / "c") >= size * 8 * kept


class Buffer:
    """Keeps one tensor."""

    def __init__(self, seen: torch.Tensor) -> None:
        self.seen = seen

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def of_as_many_bytes(path: Path, fill: int, how: str) -> None:
    """A tensor of each rank, of other shape or dtype than that of the other rank, and of as many bytes."""
    shape = (100, 200) if dist.get_rank() == 0 or how != "shape" else (200, 100)
    dtype = torch.int32 if dist.get_rank() == 1 and how == "dtype" else torch.float32
    mine = torch.full(shape, fill, dtype=dtype)
    save(path, replay=Buffer(mine))
    found = Buffer(torch.empty(0))
    load(path, replay=found)
    assert found.seen.dtype == dtype
    assert torch.equal(found.seen, mine)


@pytest.mark.parametrize("fill", [0, 1])
@pytest.mark.parametrize("how", ["shape", "dtype"])
def test_values_of_the_same_bytes_may_be_of_another_kind(
    ranks: Ranks, tmp_path: Path, fill: int, how: str
) -> None:
    """Zeros of as many bytes were taken for one tensor, and refused for their shapes."""
    ranks(2, of_as_many_bytes, tmp_path / "c", fill, how)


def test_another_generator_of_numpy_goes_on(tmp_path: Path) -> None:
    """No state could be saved with one; of another kind here the load changed tensors before it failed."""
    model = nn.Linear(2, 2)
    save(tmp_path / "twister", model)
    before, ours = model.weight.detach().clone(), np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        save(tmp_path / "c", model)
        wanted = np.random.rand(3).tolist()  # noqa: NPY002 - the global one
        load(tmp_path / "c", model)
        assert np.random.rand(3).tolist() == wanted  # noqa: NPY002
        nn.init.zeros_(model.weight)
        with pytest.raises(CheckpointError, match="numpy's generator was a MT19937 and is a PCG64 here"):
            load(tmp_path / "twister", model)
        assert not model.weight.any()
    finally:
        np.random.set_bit_generator(ours)
    load(tmp_path / "twister", model)
    assert torch.equal(model.weight, before)

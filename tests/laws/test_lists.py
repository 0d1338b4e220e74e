"""Tensors that move together are what they are alone: a part of the sweep, and faults that it must see."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch

from shardwright.comm import collective
from shardwright.testing import RankError
from tests.laws.lists import try_lists
from tests.tiers import only


@pytest.mark.parametrize("sizes", only(["2"], ["2", "3", "2x2", "2x3"]))
def test_a_list_is_what_its_members_are_alone(
    ranks: Callable[..., list[Any]], sizes: tuple[int, ...]
) -> None:
    mesh = tuple(int(size) for size in sizes.split("x"))
    for tally in ranks(prod(mesh), try_lists, mesh, 0, 6, timeout=120):
        assert set(tally.values()) == {6}


def _with_columns_as_they_lie() -> None:
    """Planted: what was gathered in columns is read as if it had no gaps."""

    def gathered(self: Any, buffers: Any, why: str) -> list[torch.Tensor]:
        received = self._arrived(torch.cat(list(buffers)), why).view(self.group.size(), -1)
        pieces = received.split([buffer.numel() for buffer in buffers], dim=1)
        return [piece.as_strided((piece.numel(),), (1,)) for piece in pieces]

    collective.Exchanging._gathered = gathered  # type: ignore[method-assign]
    try_lists((2,), 0, 10)


def _with_one_memory_for_all() -> None:
    """Planted: tensors that are reduced in a row stay views of it."""

    def together(self: Any, tasks: Any, held: Any, why: str) -> list[torch.Tensor]:
        row = self._posted(torch.cat([task._flat(x) for task, x in zip(tasks, held, strict=True)]), why)()
        pieces = row.split([task.memory.numel for task in tasks])
        return [collective.shaped(piece, task.memory) for piece, task in zip(pieces, tasks, strict=True)]

    collective.Reducing.together = together  # type: ignore[method-assign]
    try_lists((2,), 0, 10)


@pytest.mark.parametrize("planted", [_with_columns_as_they_lie, _with_one_memory_for_all])
def test_a_planted_fault_of_a_list_is_seen(
    ranks: Callable[..., list[Any]], planted: Callable[[], None]
) -> None:
    with pytest.raises(RankError, match="BrokenListError"):
        ranks(2, planted, fresh=True, timeout=120)

"""Ranks find out together whether one of them failed, so that all raise or none does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import torch.distributed as dist

from shardwright.errors import CheckpointError, ShardwrightError

T = TypeVar("T")


def world() -> int:
    """The number of ranks, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This rank, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def gather(mine: T) -> list[T]:
    """What each rank gave, in rank order. Cost: one all-gather of pickled objects."""
    if world() == 1:
        return [mine]
    everybody: list[T | None] = [None] * world()
    dist.all_gather_object(everybody, mine)
    return [one for one in everybody if one is not None]


@contextlib.contextmanager
def together(what: str) -> Iterator[None]:
    """Run a block that holds no collective on every rank; where one rank fails, every rank raises.

    Raises: CheckpointError: the first rank's reason, the same text on every rank.
    """
    reason = ""
    try:
        yield
    except ShardwrightError as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001  a peer that does not hear of it would wait for ever
        reason = f"{what} failed on rank {rank()}: {type(error).__name__}: {error}"
    first = next((one for one in gather(reason) if one), "")
    if first:
        raise CheckpointError(first)

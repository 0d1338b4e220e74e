"""What the first rank decides, for all ranks: a value, or the same error everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from shardwright.context.context import DistributedContext
from shardwright.errors import ShardwrightError

T = TypeVar("T")


def from_first_rank(context: DistributedContext, decide: Callable[[], T]) -> T:
    """Call `decide` on the first rank and return its picklable result on every rank. Collective.

    Raises: ShardwrightError: what `decide` raised, on every rank, so that none waits for one that has left.
    """
    outcome: list[T | ShardwrightError | None] = [None]
    if context.is_main:
        try:
            outcome = [decide()]
        except ShardwrightError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], ShardwrightError):
        raise outcome[0]
    return cast(T, outcome[0])

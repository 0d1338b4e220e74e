"""Ranks find out together whether one of them failed, so that all raise or none does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from shardwright.errors import CheckpointError, ShardwrightError, words_of

T = TypeVar("T")
Group = Any


def world() -> int:
    """The number of ranks, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This rank, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


class OtherFunctionError(CheckpointError):
    """Ranks call different functions: there is nothing more to agree on."""


class _Outcome(NamedTuple):
    """What a rank has to tell: what it was about to do, a result, or why there is none."""

    doing: str
    result: Any
    reason: str


def agreed(what: str, function: Callable[[], T], group: Group = None) -> list[T]:
    """Run a function that holds no collective on every rank; their results, in rank order.

    Args: what: what is done; its first word is the same on all ranks that do the same.
    Raises: OtherFunctionError: ranks do not do the same. CheckpointError: the first failing rank's reason.
        The same text on every rank.
    Cost: one all-gather of pickled results.
    """
    outcomes = _gather(_try(what, function), group)
    first = next((one.reason for one in outcomes if one.reason), "")
    if difference := _difference(outcomes):
        raise OtherFunctionError(f"{difference} ({first})" if first else difference)
    if first:
        raise CheckpointError(first)
    return [one.result for one in outcomes]


def _difference(outcomes: list[_Outcome]) -> str:
    """What a rank does that the first does not; "" where all do the same."""
    for other, one in enumerate(outcomes):
        if one.doing.split()[0] != outcomes[0].doing.split()[0]:
            return (
                f"rank 0 is {outcomes[0].doing}, and rank {other} is {one.doing}: every rank calls the same "
                "function of checkpoints, in the same order and format"
            )
    return ""


def _try(what: str, function: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(what, function(), "")
    except ShardwrightError as error:
        return _Outcome(what, None, str(error))
    except Exception as error:  # noqa: BLE001  a peer that does not hear of it would wait for ever
        return _Outcome(what, None, f"{what} failed on rank {rank()}: {words_of(error)}")


def _gather(mine: _Outcome, group: Group) -> list[_Outcome]:
    if group is not None and not dist.is_initialized():  # this rank would take itself for all of them
        raise CheckpointError(
            f"the process group was destroyed before the end of {mine.doing}: call `wait` of a save in the "
            "background on every rank before destroy_process_group()"
        )
    if world() == 1:
        return [mine]
    everybody: list[Any] = [None] * world()
    dist.all_gather_object(everybody, mine, group=group)
    return everybody

"""Ranks find out together whether one of them failed, so that all raise or none does."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self, TypeVar

import torch.distributed as dist

from shardwright.checkpoint.interrupts import Interrupts
from shardwright.errors import CheckpointError, ShardwrightError, words_of

T = TypeVar("T")
Group = Any
_OF_A_BACKEND = re.compile("gloo|nccl|mpi|connection|timed? ?out", re.IGNORECASE)  # words of its errors


def world() -> int:
    """The number of ranks, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This rank, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def warn_without_group(path: object) -> None:
    """Warn on a rank above 0 that knows no other one: it takes itself for all, and may write over the others.

    Not an error: rank 0 may write alone, after the group is gone, and each rank to a path of its own.
    """
    number = os.environ.get("RANK", "")
    if number.isdecimal() and int(number) > 0 and not dist.is_initialized():
        warnings.warn(
            f"rank {number} (RANK) has no process group and writes {path} as if it were the only one; where "
            "others write it too, the last one counts. Call torch.distributed.init_process_group() before",
            stacklevel=3,
        )


class ApartError(CheckpointError):
    """Ranks are in different calls, or one has left this one: there is nothing more to agree on."""


class LostError(ShardwrightError, RuntimeError):
    """A rank does not answer: it died, or cannot be reached. What it did of the call is not known here."""


class _Outcome(NamedTuple):
    """What a rank has to tell: its call, what it was about to do in it, a result, or why there is none.

    begun: something was agreed on in this call before. leaves: the rank is interrupted (Ctrl-C, an exit), and
    goes whatever the others say.
    """

    call: str
    begun: bool
    doing: str
    result: Any = None
    reason: str = ""
    leaves: bool = False


class Call:
    """One call of a function of checkpoints: what is agreed on in it is no other call's.

    A rank may leave a call for an exception that the others do not hear of, since it comes between two
    agreements (what signals raise does not, in a `with` block: it is held until the next one). What it says
    at the beginning of its next call then meets what they say amid the one that it left: so a call has a
    name, rank 0's, which all know from its first agreement on, and where the names differ all raise rather
    than commit half of each. Nothing is kept: the next call begins as any other.
    """

    def __init__(self) -> None:
        """A call that is yet to be begun."""
        self._name, self._begun = secrets.token_hex(8), False
        self.interrupts = Interrupts()

    def __enter__(self) -> Self:
        """Hold signals back, but where the other ranks hear of what they raise."""
        self.interrupts.hold()
        return self

    def __exit__(self, *_: object) -> None:
        """Deliver those that came since the last agreement: the call is done on all ranks."""
        self.interrupts.release()

    def agreed(
        self, what: str, function: Callable[[], T], group: Group = None, *, whole: bool = False
    ) -> list[T]:
        """Run a function that holds no collective on every rank; their results, in rank order.

        Args: what: what is done; its first word is the same on all ranks that do the same. whole: signals
            wait until all have done it, for what is done on some ranks only is worse than a call that ends.
        Raises: ApartError: ranks do not do the same, or one leaves. LostError: one does not answer.
            CheckpointError: the first failing rank's reason. The same text on every rank; but one that is
            interrupted raises that, once all have heard.
        Cost: one all-gather of pickled results.
        """
        mine, interrupt = self._try(_Outcome(self._name, self._begun, what), function, whole=whole)
        try:
            outcomes = _gather(mine, group)
        finally:
            try:
                if interrupt is not None:
                    raise interrupt
            finally:  # kept here it would keep this frame, and what it passed: an open file, a lock
                interrupt = None
        first = next((one.reason for one in outcomes if one.reason), "")
        if difference := _difference(outcomes):
            raise ApartError(f"{difference} ({first})" if first else difference)
        self._name, self._begun = outcomes[0].call, True
        if first:
            raise (ApartError if any(one.leaves for one in outcomes) else CheckpointError)(first)
        return [one.result for one in outcomes]

    def _try(
        self, mine: _Outcome, function: Callable[[], Any], *, whole: bool
    ) -> tuple[_Outcome, BaseException | None]:
        """What a rank has to tell, and the interrupt with which it goes on when it has told of it."""
        try:
            with contextlib.nullcontext() if whole else self.interrupts.open():
                return mine._replace(result=function()), None
        except ShardwrightError as error:
            return mine._replace(reason=str(error)), None
        except BaseException as error:  # noqa: BLE001  a peer that does not hear of it would wait for ever
            leaves = not isinstance(error, Exception)
            reason = f"{mine.doing} failed on rank {rank()}: {words_of(error)}"
            return mine._replace(reason=reason, leaves=leaves), error if leaves else None


def _difference(outcomes: list[_Outcome]) -> str:
    """What a rank does that the first does not; "" where all do the same."""
    first = outcomes[0]
    for other, one in enumerate(outcomes):
        both = f"rank 0 is {first.doing}, and rank {other} is {one.doing}"
        if first.begun != one.begun or (one.begun and first.call != one.call):
            left = (
                "" if first.begun == one.begun else f": rank {other if first.begun else 0} left its last one"
            )
            return (
                f"{both}, in another call{left} before its end, for an exception that the others did not "
                "hear of. Neither call is done; call it again on every rank"
            )
        if one.doing.split()[0] != first.doing.split()[0]:
            return f"{both}: every rank calls the same function of checkpoints, in the same order and format"
    return ""


def _gather(mine: _Outcome, group: Group) -> list[_Outcome]:
    if group is not None and not dist.is_initialized():  # this rank would take itself for all of them
        raise CheckpointError(
            f"the process group was destroyed before the end of {mine.doing}: call `wait` of a save in the "
            "background on every rank before destroy_process_group()"
        )
    if world() == 1:
        return [mine]
    everybody: list[Any] = [None] * world()
    with answered(mine.doing):
        dist.all_gather_object(everybody, mine, group=group)
    return everybody


@contextlib.contextmanager
def answered(doing: str) -> Iterator[None]:
    """A block of collectives of torch. Raises: LostError: a rank does not answer."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or _OF_A_BACKEND.search(str(error))):
            raise
        raise LostError(
            f"a rank did not answer rank {rank()} amid {doing}: it died, hangs or cannot be reached "
            f"(its own output may say why). End all ranks and start again. The backend says: {error}"
        ) from error

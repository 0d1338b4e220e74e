"""The end of a load: what was read is put in place, and where somebody else's code fails, all hear of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from shardwright.checkpoint.agree import Call, rank
from shardwright.errors import CheckpointError, words_of


class Change(NamedTuple):
    """One object of the state that gets its values: its path, and what puts them there."""

    path: str
    put: Callable[[], object]


def make(call: Call, path: object, changes: Iterable[Change]) -> None:
    """Make all changes, in order. A collective of a call.

    Raises: CheckpointError: on every rank, where an object of one rank does not take what it once gave; it
    says what was changed before.
    """
    call.agreed(f"loading {path}", lambda: _make(path, changes), whole=True)


def _make(path: object, changes: Iterable[Change]) -> None:
    done: list[str] = []
    for change in changes:
        try:
            change.put()
        except Exception as error:
            raise CheckpointError(
                f"{change.path} did not take on rank {rank()} what {path} holds of it "
                f"({words_of(error)}). The state is loaded in part "
                f"({', '.join(done) or 'nothing'} before it, nothing after it): do not go on with it; make "
                "it anew and load again, with only= if the rest is to be left out"
            ) from error
        done.append(change.path)

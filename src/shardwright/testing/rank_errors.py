"""How a function fails on a rank."""

from __future__ import annotations

from shardwright.errors import ShardwrightError


class RankError(ShardwrightError, RuntimeError):
    """A function failed on a rank. Its cause is the rank's own exception, where that can be pickled."""

    def __init__(self, message: str, *, rank: int, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback


class RankTimeoutError(RankError):
    """Not every rank answered in time; the message tells where each of the silent ones was."""

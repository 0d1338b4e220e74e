"""Whether this process is a rank that somebody else has started. Imports no torch."""

from __future__ import annotations

import os

from shardwright.errors import ConfigError


def given_ranks() -> int | None:
    """How many ranks somebody else (torchrun) has started, None when this process is not one of them.

    Raises: ConfigError: the environment names a rank but no number of ranks, no number, or a rank beyond it.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return None
    rank, ranks = _number("RANK"), _number("WORLD_SIZE")
    if rank >= ranks:
        raise ConfigError(
            f"the environment says RANK={rank} and WORLD_SIZE={ranks}, and ranks count from 0: start with "
            "torchrun, or unset both to have the ranks started here"
        )
    return ranks


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise ConfigError(
            f"the environment says {name}={text!r}, which is not a number: start with torchrun, "
            "or unset RANK and WORLD_SIZE to have the ranks started here"
        )
    return int(text)

"""What torch's `CommDebugMode` does not count: messages between pairs of ranks, and sums in place."""

from __future__ import annotations

import warnings

from shardwright.compat import modes_on, modes_stack

_said = False


def is_counted() -> bool:
    """Is a `CommDebugMode` on? Cost: one look at the number of active modes."""
    return modes_on() > 0 and any(type(mode).__name__ == "CommDebugMode" for mode in modes_stack())


def say_if_uncounted() -> None:
    """Warn once, where a `CommDebugMode` is on: it counts collectives, and these messages are none.

    Cost: none but one look at the number of active modes.
    """
    global _said  # noqa: PLW0603 - once per process
    if not _said and is_counted():
        _said = True
        warnings.warn(
            "CommDebugMode counts collectives only; this program also sends messages between pairs of ranks, "
            "which it does not count: sw.trace() lists both",
            stacklevel=2,
        )

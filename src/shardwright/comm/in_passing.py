"""A last word of a rank that raises an error to those that wait for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Thread

_PATIENCE = 5.0


def tell_in_passing(tell: Callable[[], object]) -> None:
    """Run a function of collectives, but wait for a few seconds at most; its errors are nobody's.

    The others may stand in another collective, of the program perhaps: who waited for them there would never
    come to his own error, whose end (that of the process) is what ends them.
    """

    def run() -> None:
        with suppress(Exception):
            tell()

    thread = Thread(target=run, name="shardwright-last-word", daemon=True)
    thread.start()
    thread.join(_PATIENCE)

"""Progress of long checks: a bar where somebody looks, a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import track

_Item = TypeVar("_Item")
_EVERY = 30.0  # seconds


def told(items: Iterable[_Item], what: str, total: int, console: Console) -> Iterator[_Item]:
    """The items, one by one, while the console tells how many of the `total` are behind."""
    if console.is_terminal:
        yield from track(items, what, total=total, console=console)
        return
    start = last = time.monotonic()
    for number, item in enumerate(items):
        yield item
        now = time.monotonic()
        if now - last >= _EVERY:
            last = now
            console.print(f"{what}: {number + 1} of {total}, {now - start:.0f} s", highlight=False)
            console.file.flush()

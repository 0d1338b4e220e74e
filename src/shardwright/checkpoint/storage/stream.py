"""Copies of much memory: past the processor's cache where the extension was built (`stream_copy.c`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.checkpoint.storage.extension import extension
from shardwright.remember import remembered

_PIECE = 1 << 20


def copy_memory(target: memoryview, source: memoryview) -> None:
    """Bytes from one place to another of the same size, which do not meet."""
    _way()(target, source)


@remembered(1)
def _way() -> Callable[[Any, Any], object]:
    built = extension("stream_copy")
    return copy_in_pieces if built is None else built.copy


def copy_in_pieces(target: memoryview, source: memoryview) -> None:
    """The same in pieces that stay in the cache."""
    for at in range(0, len(source), _PIECE):
        target[at : at + _PIECE] = source[at : at + _PIECE]

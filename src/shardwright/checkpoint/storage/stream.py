"""Copies of much memory: past the processor's cache where the extension was built (`stream_copy.c`)."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from shardwright.remember import remembered

_VARIABLE = "SHARDWRIGHT_EXTENSION"
_MODULE = "shardwright.checkpoint.storage.stream_copy"
_PIECE = 1 << 20


def copy_memory(target: memoryview, source: memoryview) -> None:
    """Bytes from one place to another of the same size, which do not meet."""
    _way()(target, source)


@remembered(1)
def _way() -> Callable[[Any, Any], object]:
    if os.environ.get(_VARIABLE) != "0":
        try:
            found: Callable[[Any, Any], object] = importlib.import_module(_MODULE).copy
        except ImportError:
            return copy_in_pieces
        return found
    return copy_in_pieces


def copy_in_pieces(target: memoryview, source: memoryview) -> None:
    """The same in pieces that stay in the cache."""
    for at in range(0, len(source), _PIECE):
        target[at : at + _PIECE] = source[at : at + _PIECE]

"""What a piece of work leaves for the garbage collector: memory that lives on for as long as that waits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tensors_in_cycles() -> Iterator[list[str]]:
    """The tensors of the block that only the collector would free, listed once the block has ended."""
    gc.collect()
    gc.disable()
    found: list[str] = []
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += [f"{tuple(x.shape)} {x.dtype}" for x in gc.garbage if isinstance(x, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()

"""What a piece of work leaves for the garbage collector: memory that lives on for as long as that waits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tensors_in_cycles() -> Iterator[list[str]]:
    """The tensors of the block that only the collector would free, listed once the block has ended.

    Not those that were there before: what caches let go of meanwhile may be of other work.
    """
    gc.collect()
    gc.disable()
    before = {id(x) for x in gc.get_objects() if _is_tensor(x)}
    found: list[str] = []
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        made = [x for x in gc.garbage if _is_tensor(x) and id(x) not in before]
        found += [f"{tuple(x.shape)} {x.dtype}" for x in made]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def _is_tensor(x: object) -> bool:
    return issubclass(type(x), torch.Tensor)  # some proxies' `isinstance` runs code

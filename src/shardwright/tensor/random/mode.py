"""Which generator random ops on DTensors use: "full", the default, or "counter"."""

from __future__ import annotations

import threading
from typing import Literal, Self

from shardwright.errors import RuleError

RandomMode = Literal["full", "counter"]

_lock = threading.Lock()
# One stack for the whole process, not one per thread: activation checkpointing draws again from the threads
# of autograd, and must draw in the same way.
_stack: tuple[RandomMode, ...] = ()


def is_counter() -> bool:
    """Is the counter-based generator chosen?"""
    return bool(_stack) and _stack[-1] == "counter"


class random_mode:  # noqa: N801 - a context manager, named like the verb that users write
    """Within the block random ops on DTensors are drawn in this way, on all threads.

    "full": equal to one device (same device type, same torch) with the same seed: every rank draws the whole
        tensor and keeps its part. Time and transient memory of the full tensor on every rank.
    "counter": each element's number is a function of the op's key and of its logical index (Philox4x32-10;
        the key is one draw from the generator): independent of placements, world size and device, and each
        rank computes only its own elements. Other numbers than plain torch's with this seed. Ops that it does
        not cover (multinomial, poisson, randperm, ...) are drawn in full; `trace()` shows it.

    Raises: RuleError: another name.
    Cost: no communication in either mode.
    """

    def __init__(self, mode: RandomMode) -> None:
        if mode not in ("full", "counter"):
            raise RuleError(f"random_mode({mode!r}): there are 'full' (the default) and 'counter'")
        self._mode: RandomMode = mode

    def __enter__(self) -> Self:
        global _stack  # noqa: PLW0603 - see above
        with _lock:
            _stack = (*_stack, self._mode)
        return self

    def __exit__(self, *_: object) -> None:
        global _stack  # noqa: PLW0603
        with _lock:
            last = len(_stack) - 1 - _stack[::-1].index(self._mode)
            _stack = (*_stack[:last], *_stack[last + 1 :])

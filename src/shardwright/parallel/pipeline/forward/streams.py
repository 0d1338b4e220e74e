"""Random numbers of the model's own code: the same on every stage of one micro-batch."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

_BYTES = 7


class Streams:
    """The generators of a rank during one run of a stage: its own for parts, common ones for the code above.

    Every function of the model's own code begins from a seed that its number in the run gives, so that what a
    stage draws does not depend on what it could leave out. Parts go on from where the rank's generators were.

    Args: seed: the same on all stages for one micro-batch; None: the own code is taken to draw nothing, and
        `drew` and `drew_python` say whether it did. python: it draws from `random` and numpy too.
    """

    def __init__(self, device: torch.device, seed: int | None, *, python: bool = False) -> None:
        self.generators = [torch.default_generator]
        if device.type == "cuda":
            self.generators.append(torch.cuda.default_generators[device.index])
        self.seed, self.python = seed, python
        self.drew = self.drew_python = False
        self.before: list[Any] = []

    def enter(self) -> None:
        """The model's own code begins."""
        self.before = self._state()
        self.begin(-1)
        if self.seed is not None and self.python:
            random.seed(self.seed)
            np.random.seed(self.seed % 2**32)  # noqa: NPY002  the global one

    def leave(self) -> None:
        """It ends: the rank's own generators, where its parts left them."""
        self.to_part()

    def to_part(self) -> None:
        """A part of this stage begins: it draws from the rank's own generators."""
        if self.seed is None:
            self._compare(self._state())
            return
        self.common = self._state()
        self._set(self.before)

    def from_part(self) -> bool:
        """It has ended. Has it drawn, where own code has other generators?"""
        before, self.before = self.before, self._state()
        if self.seed is None:
            return False
        self._set(self.common)
        n = len(self.generators)
        return any(not torch.equal(a, b) for a, b in zip(before[:n], self.before[:n], strict=True))

    def begin(self, number: int) -> None:
        """The function of this number begins."""
        if self.seed is not None:
            seed = mixed(self.seed, number)
            for generator in self.generators:
                generator.manual_seed(seed)

    def _state(self) -> list[Any]:
        found: list[Any] = [generator.get_state() for generator in self.generators]
        if self.python:
            found += [random.getstate(), np.random.get_state(legacy=True)]  # noqa: NPY002  the global one
        return found

    def _compare(self, now: list[Any]) -> None:
        n = len(self.generators)
        self.drew |= any(not torch.equal(a, b) for a, b in zip(now[:n], self.before[:n], strict=True))
        self.drew_python |= any(a != b for a, b in zip(_plain(now[n:]), _plain(self.before[n:]), strict=True))

    def _set(self, state: list[Any]) -> None:
        for generator, value in zip(self.generators, state, strict=False):
            generator.set_state(value)
        if self.python:
            random.setstate(state[-2])
            np.random.set_state(state[-1])  # noqa: NPY002  the global one


def _plain(state: list[Any]) -> list[Any]:
    return [[x.tobytes() if isinstance(x, np.ndarray) else x for x in one] for one in state]


def mixed(seed: int, number: int) -> int:
    """The seed of the part of this number: of a micro-batch, of a function. Sums would meet each other."""
    text = f"{seed}/{number}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=_BYTES).digest())

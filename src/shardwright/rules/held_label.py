"""What a coord holds of a label: its logical indices, in local order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import _lru_cache_wrapper, cached_property
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from shardwright.compat import FakeTensor, assert_async, modes_on, without_modes
from shardwright.compat.dynamo import trace_again_with_numbers
from shardwright.errors import OutsideError
from shardwright.index.runs import Runs, intervals, total
from shardwright.remember import remembered

Pieces: TypeAlias = tuple[tuple[int, int], ...]  # (start, length) of contiguous indices, in local order
_Indices = TypeVar("_Indices", Tensor, tuple[Tensor, Tensor])


@dataclass(frozen=True)
class Held:
    """The indices of a label of logical length `size` that this coord holds, as runs in local order."""

    size: int
    runs: Runs

    @cached_property
    def length(self) -> int:
        """How many indices these are."""
        return total(self.runs)

    @cached_property
    def pieces(self) -> Pieces:
        """The indices as contiguous pieces."""
        return tuple(intervals(self.runs))

    @cached_property
    def start(self) -> int | None:
        """The first index where all are one contiguous piece, in order; None where they are not."""
        if not self.pieces:
            return 0
        return self.pieces[0][0] if len(self.pieces) == 1 else None

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """The logical indices in local order:  [] -> i64[length]."""
        if self.start is not None:
            return torch.arange(self.start, self.start + self.length, device=device)
        return _kept(_positions, self.pieces, torch.device(device))

    def locate(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Where logical indices stand on this coord:  [...] -> i64[...], bool[...].

        Returns: the local index (0 where the coord does not hold it), and whether it holds it.
        """
        if self.start is not None:
            local = index - self.start
            here = (local >= 0) & (local < self.length)
            return local.masked_fill(~here, 0), here
        ordered, order = _kept(_ordered, self.pieces, index.device)
        at = torch.searchsorted(ordered, index.contiguous()).clamp_(max=self.length - 1)
        here = ordered[at] == index
        return order[at].masked_fill(~here, 0), here

    def wrapped(self, index: Tensor, *, from_end: bool = True) -> Tensor:
        """Indices counted from the front; `from_end`: those below 0 are counted from the end.

        Raises: OutsideError: one is outside, where values are read.
        """
        outside = (index < (-self.size if from_end else 0)) | (index >= self.size)
        seen = (
            not (torch.compiler.is_compiling() or isinstance(index, FakeTensor))
            and index.device.type == "cpu"
        )
        if seen and modes_on():
            with without_modes():
                self._refuse(index, outside)
        elif seen:
            self._refuse(index, outside)
        if not seen or modes_on():  # what is recorded is asked of other indices
            assert_async(~outside.any(), f"an index is out of bounds for dimension with size {self.size}")
        return torch.where(index < 0, index + self.size, index) if from_end else index

    def _refuse(self, index: Tensor, outside: Tensor) -> None:
        if bool(outside.any()):
            wrong = int(index[outside].reshape(-1)[0])
            raise OutsideError(f"index {wrong} is out of bounds for dimension with size {self.size}")


class HeldOfSymbol(Held):
    """That of a label whose length is a symbol of a graph: who asks for more asks for a number."""

    def __init__(self, size: Any, at: Callable[[int], Held]) -> None:
        vars(self).update(size=size, _at=at)

    @property
    def runs(self) -> Runs:
        """Those of the number, for which alone the graph holds then."""
        at: Callable[[int], Held] = vars(self)["_at"]
        trace_again_with_numbers([self.size])
        return at(int(self.size)).runs


def _kept(made: _lru_cache_wrapper[_Indices], pieces: Pieces, device: torch.device) -> _Indices:
    """What is remembered; under a mode made anew: neither has a use for tensors of the other."""
    return made.__wrapped__(pieces, device) if modes_on() else made(pieces, device)


@remembered(256)
def _positions(pieces: Pieces, device: torch.device) -> Tensor:
    ranges = [torch.arange(start, start + length, device=device) for start, length in pieces]
    return torch.cat(ranges)


@remembered(256)
def _ordered(pieces: Pieces, device: torch.device) -> tuple[Tensor, Tensor]:
    """The indices in ascending order, and where each stands locally."""
    found = torch.sort(_kept(_positions, pieces, device))
    return found.values, found.indices

"""The walks: calls of the library that are counted, and how short each shall become."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from bench.walks.counting import Count, count
from bench.walks.library import Library
from shardwright.tensor.doors import open_doors, uses_extension

# Makes the operands; then each call makes what one call needs, and what is returned is the call.
_Walking = Callable[[Library, DeviceMesh], Callable[[], Callable[[], object]]]
_KNOWN_AFTER = 3


@dataclass(frozen=True)
class Walk:
    """One call, the first of its kind or a known one.

    goal: the most calls and files that it shall take in the end.
    in_c: with known calls in C, where the extension was built; the other walks are those of Python.
    counted: the numbers that are told of it.
    """

    title: str
    walking: _Walking
    goal: Mapping[str, int]
    known: bool
    counted: Sequence[str] = ("calls", "files")
    in_c: bool = False

    def count(self, library: Library, mesh: DeviceMesh) -> Count:
        """Count it in this process, which must not have walked it before."""
        if not self.in_c:
            open_doors(extension=False)
        ready = self.walking(library, mesh)
        for _ in range(_KNOWN_AFTER if self.known else 0):
            ready()()
        return count(ready(), library.folder)

    def kept(self, found: Count) -> dict[str, int]:
        """The numbers of a count that are told of this walk."""
        return {what: found.numbers[what] for what in self.counted}


def _matmul(library: Library, mesh: DeviceMesh) -> Callable[[], Callable[[], object]]:
    x, w = library.square(0, mesh), library.square(None, mesh)
    return lambda: lambda: x @ w


def _backward(library: Library, mesh: DeviceMesh) -> Callable[[], Callable[[], object]]:
    x, w = library.square(0, mesh, grad=True), library.square(None, mesh, grad=True)

    def ready() -> Any:
        x.grad = w.grad = None
        return (x @ w).sum().backward

    return ready


def _redistribute(library: Library, mesh: DeviceMesh) -> Callable[[], Callable[[], object]]:
    x, target = library.square(1, mesh), [library.module.Replicate()]
    return lambda: lambda: x.redistribute(mesh, target)


def _slice(library: Library, mesh: DeviceMesh) -> Callable[[], Callable[[], object]]:
    x = library.square(0, mesh)
    return lambda: lambda: x[2:6]


def _softmax(library: Library, mesh: DeviceMesh) -> Callable[[], Callable[[], object]]:
    x = library.square(1, mesh)
    return lambda: lambda: torch.softmax(x, 1)


WALKS = {
    "matmul": Walk("x @ w, known", _matmul, {"calls": 6, "files": 4}, known=True),
    "backward": Walk("backward of (x @ w).sum(), known", _backward, {"calls": 100, "files": 12}, known=True),
    "matmul_in_c": Walk("x @ w, known, in C", _matmul, {"calls": 0, "files": 0}, known=True, in_c=True),
    "backward_in_c": Walk(
        "backward of (x @ w).sum(), known, in C", _backward, {"calls": 40, "files": 12}, known=True, in_c=True
    ),
    "redistribute": Walk("redistribute, known", _redistribute, {"calls": 40, "files": 10}, known=True),
    "redistribute_first": Walk(
        "redistribute, first", _redistribute, {"calls": 250, "files": 20}, known=False
    ),
    "slice_first": Walk("x[2:6] of a cut dim, first", _slice, {"calls": 500, "files": 20}, known=False),
    "softmax_first": Walk(
        "softmax over a cut dim, first",
        _softmax,
        {"calls": 1500, "files": 30},
        known=False,
        counted=("calls", "files", "changes"),
    ),
}


def there() -> list[str]:
    """The walks that can be counted here: those in C where the extension was built."""
    return [name for name, walk in WALKS.items() if uses_extension() or not walk.in_c]

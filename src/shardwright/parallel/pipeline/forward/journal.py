"""What a stage did in the model's own code: the same on every stage, up to where it ends."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

_PLAIN = (int, float, complex, bool, str, type(None))


class Journal:
    """A line for each function and each call of a part, in the model's own code.

    Two stages that run the same code on the same arguments write the same lines, the later one more of them:
    shapes and plain numbers are known everywhere. Where they differ the code has read something that only one
    of them has. The lines are kept while the borders are learned; afterwards only their checksum.

    Attributes: lines: None where only the checksum is wanted. entered: the checksum where the first part of
    this stage was called, None before. sum: that of all lines.
    """

    def __init__(self, *, keep: bool) -> None:
        self.lines: list[str] | None = [] if keep else None
        self.sum = 0
        self.count = 0
        self.entered: int | None = None

    def note(self, name: str, leaves: Iterable[Any]) -> None:
        """Write a line."""
        line = f"{name}({', '.join(map(_told, leaves))})"
        self.sum = zlib.crc32(line.encode(), self.sum)
        self.count += 1
        if self.lines is not None:
            self.lines.append(line)

    def enter(self) -> None:
        """The first part of this stage is called."""
        if self.entered is None:
            self.entered = self.sum


def _told(x: Any) -> str:
    """What every stage knows of an argument: devices and values of tensors are no part of it."""
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
    if isinstance(x, float):
        return f"{x:.3g}"  # a sum of another rank may round in another way
    return repr(x) if isinstance(x, _PLAIN) else type(x).__name__


def first_difference(one: Sequence[str], other: Sequence[str]) -> tuple[str, str, str] | None:
    """Where `other` does not begin with `one`: the line before, and both lines."""
    for i, line in enumerate(one):
        there = other[i] if i < len(other) else "the end of the forward"
        if line != there:
            return (one[i - 1] if i else "the beginning", line, there)
    return None

"""What ranks tell each other about their programs, read on the host."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def told(x: Tensor) -> list[Any]:
    """The values of `x`, by which this rank goes on as all ranks do:  [...] -> nested lists.

    They say what the program is (which gradients exist, say), never what its data are: a program that is
    recorded may take them as they are, and must compare them each time it is replayed.
    """
    values: list[Any] = x.tolist()
    return values

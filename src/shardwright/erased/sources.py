"""Where a replay finds the tensors that a program takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor among the arguments: the number of its leaf."""

    leaf: int


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """The local tensor of something that the program holds (a parameter, a buffer, a state), by identity."""

    path: str
    local: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Gradient:
    """The gradient that a parameter, or the argument of this number, has when the call begins."""

    path: str
    parameter: Any


@dataclass(frozen=True, slots=True)
class Tangent:
    """The gradient of a result, in the backward."""

    result: int

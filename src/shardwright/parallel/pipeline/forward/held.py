"""A part, as one rank knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from shardwright.parallel.pipeline.places import Place


@dataclass
class Held:
    """What this rank knows of one part: the stages that hold it, and the module where this rank does."""

    key: str
    stages: tuple[int, ...]
    has_trained: bool = True
    module: nn.Module | None = None


def held(place: Place) -> Held:
    """What runs need to know of the part that stands here."""
    part = place.part()
    return Held(place.key, place.stages, any(p.requires_grad for p in part.parameters()), part)

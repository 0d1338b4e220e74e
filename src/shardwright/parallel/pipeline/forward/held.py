"""A part, as one rank knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwright.parallel.pipeline.forward.unknown import Unknown
from shardwright.parallel.pipeline.places import Place

Shown = tuple[dict[str, Any], str, Any, Unknown]  # where, the name, what was there, what stands there

_NOTHING = object()


@dataclass
class Held:
    """What this rank knows of one part: the stages that hold it, and the module, a shell where others do.

    left: stand-ins for what its forward sets, by the path of the module in it and the name.
    """

    key: str
    stages: tuple[int, ...]
    has_trained: bool = True
    module: nn.Module | None = None
    left: dict[tuple[str, str], Unknown] = field(default_factory=dict)

    def hide(self, *, buffers: bool = True) -> list[Shown]:
        """Put the stand-ins where this part has not run; what was there, for `show`. buffers: of them too."""
        was: list[Shown] = []
        if self.module is None:
            return was
        for (path, name), unknown in self.left.items():
            module = self.module.get_submodule(path)
            if name in module._buffers and not buffers:
                continue
            there = module.__dict__
            was.append((there, name, there.get(name, _NOTHING), unknown))
            there[name] = unknown
        return was


def show(was: list[Shown]) -> None:
    """What was hidden is there again, but for what was set since."""
    for there, name, value, unknown in reversed(was):
        if there.get(name) is not unknown:
            continue
        if value is _NOTHING:
            del there[name]
        else:
            there[name] = value


def held(place: Place) -> Held:
    """What runs need to know of the part that stands here."""
    part = place.part()
    return Held(place.key, place.stages, any(p.requires_grad for p in part.parameters()), part)

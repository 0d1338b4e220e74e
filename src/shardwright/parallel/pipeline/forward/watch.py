"""What layers leave in themselves in a step, and left not when the borders were learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from shardwright.parallel.pipeline.forward.aside import attributes_of
from shardwright.parallel.pipeline.forward.conductor import Elsewhere
from shardwright.parallel.pipeline.forward.inside import Look, Was
from shardwright.parallel.pipeline.split import Split


class Watch:
    """Looks at the attributes of this rank's parts, before a step and after it.

    Ranks that do not hold a part read what its attributes were when it was cut. What its forwards set is
    unknown to them from the first step on (`Split.left_behind`); this finds what they set later.

    Cost: all attributes of the modules of this rank's parts are compared by identity and version; no tensor
    is read.
    """

    def __init__(self, split: Split) -> None:
        self._split = split
        self._before: dict[tuple[str, str], Was] = {}

    def begin(self) -> None:
        """A step begins."""
        look = Look(copies=False)
        self._before = {place: look.at(value) for place, value in self._attributes()}

    def changed(self) -> frozenset[tuple[str, str]]:
        """(module, name) of what was set since."""
        found = [
            place
            for place, value in self._attributes()
            if place not in self._before or self._before[place].differs(value)
        ]
        self._before = {}
        return frozenset(found)

    def _attributes(self) -> Iterator[tuple[tuple[str, str], Any]]:
        for path, module in self._modules():
            for name, value in attributes_of(module).items():
                if (path, name) not in self._split.left:
                    yield (path, name), value

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        for path, place in self._split.parts.items():
            part = place.parent._modules[place.name]
            if part is not None and type(part) is not Elsewhere:
                for below, module in part.named_modules():
                    yield f"{path}.{below}".rstrip("."), module


def set_too_late(found: frozenset[tuple[str, str]]) -> str:
    """The text of the error."""
    names = ", ".join(sorted(f"{path}.{name}" for path, name in found))
    return (
        f"pipeline: {names} is set by the forward of a layer in this step, and was not when the borders were "
        "learned, at the first step of these shapes: the model's own code on other ranks may have read what "
        "it was before. From now on it is an error to read it there\n  fix: return it from the layer, or set "
        "it in every forward; this step can be run again"
    )

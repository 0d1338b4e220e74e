"""The call of a part: made, or answered from what earlier stages left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.compat import FakeTensor, tree_leaves, tree_map
from shardwright.errors import ParallelError
from shardwright.parallel.pipeline.border import Leaf

if TYPE_CHECKING:
    from shardwright.parallel.pipeline.places import Place


class Call(NamedTuple):
    """The n-th call of a part in one forward of the model."""

    key: str
    number: int


class Value(NamedTuple):
    """One tensor of what a call returned: the leaf of this number."""

    call: Call
    leaf: int


class Stopped(Exception):  # noqa: N818  no error: the stage has done its part
    """The forward of the model has come to a part of a later stage."""


class NeededError(Exception):
    """A value of an earlier stage is computed with that had not been asked for."""

    def __init__(self, values: frozenset[Value]) -> None:
        super().__init__(values)
        self.values = values


@dataclass
class Held:
    """What this rank knows of one part: the stages that hold it."""

    key: str
    stages: tuple[int, ...]
    has_trained: bool = True


@dataclass
class Run:
    """One forward of the model for one stage.

    received: values of earlier stages, by name. known: what calls of earlier stages return, tensors as
    `Leaf`. wanted: values to keep for later stages; None: all (while the borders are learned). copied: those
    that the model's own code writes into afterwards, and will in the next stage again. While the borders are
    learned: rewritten: such values; written: those that a part writes into, and which part.
    """

    stage: int
    received: Mapping[Value, Tensor]
    known: Mapping[Call, Any]
    wanted: frozenset[Value] | None
    hollow: Callable[[Leaf], Tensor]
    counts: Counter[str] = field(default_factory=Counter)
    copied: frozenset[Value] = frozenset()
    kept: dict[Value, Tensor] = field(default_factory=dict)
    versions: dict[Value, int] = field(default_factory=dict)
    rewritten: set[Value] = field(default_factory=set)
    written: dict[Value, str] = field(default_factory=dict)
    trees: dict[Call, Any] = field(default_factory=dict)
    trained: bool = field(default_factory=torch.is_grad_enabled)

    def call(self, part: Held, make: Callable[[], Any] | None, given: Any) -> Any:
        """What the model's own code is handed for a call of `part`."""
        call = Call(part.key, self.counts[part.key])
        self.counts[part.key] += 1
        if call in self.known:
            return self._answered(call)
        if self.stage not in part.stages or make is None:
            if max(part.stages) < self.stage:
                raise ParallelError(_late(part, self.stage))
            raise Stopped
        if self.wanted is None:
            self._refuse_hollow(given)
            self.rewritten.update(self.look())
        elif any(origins(x) for x in tree_leaves(given)):
            raise ParallelError(ANOTHER_BRANCH.format(part.key))
        out = make()
        if self.wanted is None:
            self.written |= dict.fromkeys(self.look(), part.key)
        self._keep(part, call, out)
        return out

    def look(self) -> list[Value]:
        """The values that were written into since the last look."""
        there = {**self.received, **self.kept}
        found = [v for v, x in there.items() if x._version != self.versions.setdefault(v, 0)]
        self.versions |= {value: there[value]._version for value in found}
        return found

    def _answered(self, call: Call) -> Any:
        numbers = iter(range(1 << 30))

        def value(leaf: Any) -> Any:
            if not isinstance(leaf, Leaf):
                return leaf
            name = Value(call, next(numbers))
            there = self.received.get(name)
            if there is not None:
                return there
            stand_in = self.hollow(leaf)
            mark(stand_in, frozenset([name]))
            return stand_in

        return tree_map(value, self.known[call])

    def _keep(self, part: Held, call: Call, out: Any) -> None:
        if self.trained and not torch.is_grad_enabled() and part.has_trained and self.wanted is not None:
            raise ParallelError(
                f"{part.key} runs without gradients inside of a forward with gradients, so nothing comes "
                "back to it from the next stage\n  fix: activation checkpointing with use_reentrant=False"
            )
        number = 0
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                name = Value(call, number)
                number += 1
                if self.wanted is None or name in self.wanted:
                    self.kept[name] = leaf.clone() if name in self.copied else leaf
                    self.versions[name] = leaf._version
        if self.wanted is None:
            self.trees[call] = out

    def _refuse_hollow(self, given: Any) -> None:
        asked: frozenset[Value] = frozenset().union(*(origins(x) for x in tree_leaves(given)))
        if asked:
            raise NeededError(asked)


ANOTHER_BRANCH = (
    "pipeline: {} is computed with a tensor of another stage that was not asked for when the borders were "
    "learned, at the first step of these shapes: the forward took another branch since\n"
    "  fix: let no value of a tensor or an attribute decide what the layers are given, or decide it by an "
    "argument that is no tensor"
)


def mark(x: Tensor, values: frozenset[Value]) -> None:
    """Note of which values of earlier stages a hollow tensor is made."""
    x.made_of = values  # type: ignore[attr-defined]


def origins(x: Any) -> frozenset[Value]:
    """The values of earlier stages that a hollow tensor is made of; none of any other."""
    if not isinstance(x, FakeTensor):
        return frozenset()
    found: frozenset[Value] = getattr(x, "made_of", frozenset())
    return found


def _late(part: Held, stage: int) -> str:
    return (
        f"{part.key} is held by stage {part.stages[-1]}, for it is registered before the cuts after it, and "
        f"is called in stage {stage}\n  fix: parallelize_pipeline(..., stages={{{part.key!r}: {stage}}})"
    )


class Conductor:
    """Hears every call of a part on this rank while a stage runs; else calls are what they were."""

    def __init__(self) -> None:
        self.run: Run | None = None

    def hears(self, part: Held, original: Callable[..., Any]) -> Callable[..., Any]:
        """A call of a part that this rank holds."""

        def called(*args: Any, **kwargs: Any) -> Any:
            if self.run is None:
                return original(*args, **kwargs)
            run, made = self.run, lambda: original(*args, **kwargs)
            return run.call(part, made, (args, kwargs))

        return called

    def absent(self, part: Held, args: tuple[Any, ...]) -> Any:
        """A call of a part that another rank holds."""
        if self.run is None:
            raise ParallelError(
                f"{part.key} is held by stage {part.stages[0]} of a pipeline, on another rank: run the model "
                "with Pipeline(model, ...).step(...)"
            )
        return self.run.call(part, None, args)


class Elsewhere(nn.Module):
    """Stands where a part stood that another rank holds. Reads like the part, but has no parameters."""

    def __init__(self, conductor: Conductor, part: Held, shell: nn.Module) -> None:
        super().__init__()
        self.__dict__["told"] = (conductor, part, shell)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the part returned on its own rank."""
        conductor, part, _ = self.told
        return conductor.absent(part, (*args, *kwargs.values()))

    def __getattr__(self, name: str) -> Any:
        """Any other attribute is the part's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["told"][2], name)

    def extra_repr(self) -> str:
        """Which part, and where it is."""
        part = self.told[1]
        return f"{part.key}, in stage {part.stages[0]}"


def held(place: Place) -> Held:
    """What runs need to know of the part that stands here."""
    trained = any(p.requires_grad for p in place.part().parameters())
    return Held(place.key, place.stages, trained)

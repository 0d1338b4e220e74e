"""One forward of the model for one stage: calls of parts are made, or answered from earlier stages."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardwright.compat import tree_leaves, tree_map
from shardwright.compat.function_modes import PushedDown
from shardwright.errors import ParallelError
from shardwright.parallel.pipeline.border import Leaf
from shardwright.parallel.pipeline.forward.held import Held, Shown, show
from shardwright.parallel.pipeline.forward.hollow import Call, HollowMode, Value, mark, origins
from shardwright.parallel.pipeline.forward.journal import Journal
from shardwright.parallel.pipeline.forward.memory import Memory
from shardwright.parallel.pipeline.forward.outside import Outside, changed_outside
from shardwright.parallel.pipeline.forward.own_code import OwnCode
from shardwright.parallel.pipeline.forward.returned import (
    another_branch,
    check_returned,
    number_of,
    refuse_attributes,
    values_in,
)
from shardwright.parallel.pipeline.forward.streams import Streams


class Stopped(Exception):  # noqa: N818  no error: the stage has done its part
    """The forward of the model has come to a part of a later stage."""


class NeededError(Exception):
    """A value of an earlier stage is computed with that had not been asked for."""

    def __init__(self, values: frozenset[Value]) -> None:
        super().__init__(values)
        self.values = values


@dataclass
class Run:
    """One forward of the model for one stage.

    received: values of earlier stages, by name. known: what calls return, tensors as `Leaf`: while the
    borders are learned, those of earlier stages, else all. earlier: the calls that earlier stages have made.
    wanted: values to keep for later stages; None: all (while the borders are learned). copied: those that the
    model's own code writes into afterwards, and will in the next stage again.

    While the borders are learned: rewritten: such values; written: those that a part writes into, and which
    part; stained: parts whose buffers changed; left: (module, name) of what parts set; writes_batch:
    something writes into the arguments.

    inside: a call of a part is dealt with; depth: it runs. ended: what has ended the forward, which the
    model's code may have caught. hidden: what stand-ins stand for, of parts that this stage does not run.
    outside: the globals and the like that its code names.
    """

    stage: int
    received: Mapping[Value, Tensor]
    known: Mapping[Call, Any]
    earlier: frozenset[Call]
    wanted: frozenset[Value] | None
    hollow: Callable[[Leaf], Tensor]
    mode: HollowMode
    streams: Streams
    outside: Outside = field(default_factory=Outside)
    counts: Counter[str] = field(default_factory=Counter)
    copied: frozenset[Value] = frozenset()
    kept: dict[Value, Tensor] = field(default_factory=dict)
    versions: dict[Value, int] = field(default_factory=dict)
    rewritten: set[Value] = field(default_factory=set)
    written: dict[Value, str] = field(default_factory=dict)
    stained: set[str] = field(default_factory=set)
    left: set[tuple[str, str]] = field(default_factory=set)
    hidden: list[Shown] = field(default_factory=list)
    writes_batch: bool = False
    trees: dict[Call, Any] = field(default_factory=dict)
    trained: bool = field(default_factory=torch.is_grad_enabled)
    inside: bool = False
    depth: int = 0
    ended: Exception | None = None

    def __post_init__(self) -> None:
        self.journal = Journal(keep=self.learns)
        self.own_code: OwnCode | None = None

    @property
    def learns(self) -> bool:
        """Are the borders being learned?"""
        return self.wanted is None

    @contextmanager
    def followed(self, parts: Iterable[Held]) -> Iterator[None]:
        """The model's own code runs inside. What `parts` of other stages leave is hidden from it."""
        for part in parts:
            if self.stage not in part.stages:
                self.hidden += part.hide()
        self.streams.enter()
        self.own_code = OwnCode(self)
        try:
            with self.own_code:
                yield
        finally:
            self.own_code = None  # the two would keep each other, and what was computed, alive
            self.streams.leave()
            show(self.hidden)

    def call(self, part: Held, make: Callable[[], Any] | None, given: Any) -> Any:
        """What the model's own code is handed for a call of `part`."""
        if self.ended is not None:
            raise self.ended
        call = Call(part.key, self.counts[part.key])
        self.counts[part.key] += 1
        leaves = tree_leaves(given)
        if self.inside:  # a part has called another one
            return self._heard(part, call, make, leaves)
        self.inside = True
        try:
            with PushedDown(self.own_code):  # what follows asks tensors for their shapes, time and again
                self.journal.note(f"{part.key} ", leaves)
                return self._heard(part, call, make, leaves)
        finally:
            self.inside = False

    def _heard(self, part: Held, call: Call, make: Callable[[], Any] | None, leaves: list[Any]) -> Any:
        if call in self.earlier:
            self.hidden += part.hide(buffers=self.stage not in part.stages)
            return self._answered(call)
        if self.stage not in part.stages or make is None:
            self._end(Stopped() if max(part.stages) >= self.stage else ParallelError(self._late(part)))
        self.journal.enter()
        asked: frozenset[Value] = frozenset().union(*map(origins, leaves))
        if asked:
            self.need(asked, part=part.key)
        return self._made(part, call, make)

    def need(
        self, values: frozenset[Value], error: Exception | None = None, *, part: str | None = None
    ) -> NoReturn:
        """These values are computed with, and are not here. Raises: NeededError, ParallelError."""
        if self.learns:
            self._end(NeededError(values), error)
        self._end(ParallelError(another_branch(part or f"the code around {min(values).call.key}")), error)

    def refuse(self, why: str) -> NoReturn:
        """Raises: ParallelError: the model's own code does what stages cannot do."""
        self._end(ParallelError(f"pipeline: {why}"))

    def _end(self, error: Exception, cause: Exception | None = None) -> NoReturn:
        self.ended = error
        raise error from cause

    def _made(self, part: Held, call: Call, make: Callable[[], Any]) -> Any:
        if self.learns:
            self.rewritten.update(self.look())
            before, left = _buffers(part), _memory(part)
        outside = self.outside.look(part.stages)
        with self._part(), self.mode.refused(lambda values: self.need(values, part=part.key)):
            out = make()
        for said in outside.changed():
            self.refuse(changed_outside(said, part.key))
        if self.learns:
            self.written |= dict.fromkeys(self.look(), part.key)
            if not _same(before, _buffers(part)):
                self.stained.add(part.key)
            self.left.update(left.changed())
        else:
            self._check(part, call, out)
        self._keep(call, out)
        return self._handed(call, out)

    def _handed(self, call: Call, out: Any) -> Any:
        """What the model's own code gets of it: an alias of what leaves.

        A hook that it registers is registered by the next stage too, and must run once.
        """
        if self.wanted is None or not any(value.call == call for value in self.wanted):
            return out
        numbers = iter(range(1 << 30))

        def one(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf if type(leaf) is not float else (next(numbers), leaf)[1]
            leaves = Value(call, next(numbers)) in (self.wanted or ())
            return leaf.view_as(leaf) if leaves and leaf.requires_grad else leaf

        return tree_map(one, out)

    @contextmanager
    def _part(self) -> Iterator[None]:
        """A part runs: its functions are not own code, and it draws from the rank's generators."""
        if self.depth:
            yield
            return
        self.depth = 1
        self.streams.to_part()
        try:
            yield
        finally:
            drew = self.streams.from_part()
            self.depth = 0
        if drew and _in_checkpoint():
            self.refuse(
                "a layer draws random numbers inside of a checkpoint, and the model's own code draws too: "
                "the layer would be computed anew with other numbers\n  fix: draw in a layer, such as "
                "nn.Dropout, instead of in the model's own code"
            )

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
            if leaf.number is not None:
                return float(there) if there is not None else self.need(frozenset([name]))
            if there is not None:
                return there
            stand_in = self.hollow(leaf)
            mark(stand_in, frozenset([name]))
            return stand_in

        return tree_map(value, self.known[call])

    def _check(self, part: Held, call: Call, out: Any) -> None:
        if self.trained and not torch.is_grad_enabled() and part.has_trained:
            raise ParallelError(
                f"{part.key} runs without gradients inside of a forward with gradients, so nothing comes "
                "back to it from the next stage\n  fix: activation checkpointing with use_reentrant=False; "
                "what own code runs under no_grad() belongs in a layer"
            )
        try:
            check_returned(call, self.known.get(call), out)
        except ParallelError as error:
            self._end(error)

    def _keep(self, call: Call, out: Any) -> None:
        for number, leaf in enumerate(values_in(out)):
            refuse_attributes(call, leaf)
            name = Value(call, number)
            if self.wanted is None or name in self.wanted:
                value = leaf if isinstance(leaf, Tensor) else number_of(leaf)
                self.kept[name] = value.clone() if name in self.copied else value
                self.versions[name] = value._version
        if self.wanted is None:
            self.trees[call] = tree_map(lambda leaf: leaf, out)  # as returned: own code may write into it

    def _late(self, part: Held) -> str:
        held, key = part.stages[-1], part.key
        if any(call.key == key for call in self.earlier):
            return (
                f"{key} is held by stage {held}, which has called it, and stage {self.stage} calls it again\n"
                f"  fix: parallelize_pipeline(..., stages={{{key!r}: {(held, self.stage)}}})"
            )
        # What this stage has called by then may be what stands in the wrong one.
        first = next((call.key for call in self.trees if call.key != key), None)
        after, other = "", ""
        if first is not None:
            after = f", after {first}"
            other = (
                f", or {{{first!r}: {held}}} where {first} belongs to stage {held} too ({held, self.stage} "
                "where both call it)"
            )
        return (
            f"{key} is held by stage {held}, for it is registered before the cuts after it, and is called in "
            f"stage {self.stage}{after}\n  fix: parallelize_pipeline(..., stages={{{key!r}: {self.stage}}})"
            f"{other}; if stage {held} has computed it, call it there as a module: layer(x), not "
            "layer.forward(x)"
        )


def _in_checkpoint() -> bool:
    """Does `torch.utils.checkpoint` call this? It notes the state of generators, to begin there once more."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "torch.utils.checkpoint":
        frame = frame.f_back
    return frame is not None


def _buffers(part: Held) -> list[Any]:
    module = part.module
    return [] if module is None else [(b, b.detach().clone()) for b in module.buffers()]


def _memory(part: Held) -> Memory:
    inside = {} if part.module is None else dict(part.module.named_modules(prefix=part.key))
    return Memory(inside, values=True, buffers=True)


def _same(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(
        a.shape == b.shape and bool((a == b).all()) for (_, a), (_, b) in zip(before, after, strict=True)
    )

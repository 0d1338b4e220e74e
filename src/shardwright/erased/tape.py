"""The tape: what this rank did on plain local tensors, line by line, with its values by number.

A tensor is found on it by its object or by its memory: what autograd saved comes back as another object of
the same storage and geometry. All that was met is held while the tape runs, so that neither an `id` nor a
storage can be taken again by another one.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwright.compat import tree_leaves
from shardwright.erased.operands import FUNCTIONAL, flat, written_among
from shardwright.erased.sources import Given, Gradient, Held
from shardwright.errors import EraseError


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of the program: its number among the values."""

    number: int


@dataclass(frozen=True, slots=True)
class Number:
    """A Python number of the program, as text: what an optimizer makes of a step count that it reads."""

    text: str


@dataclass(slots=True, eq=False)
class Line:
    """One call on local tensors.

    call:   an operator, or a function of this package that stands for what the host did.
    outs:   per result the number of the value that it makes; None: it makes none, or gives a known one back.
    number: for a read by an optimizer, the name of the number that it makes.
    sent:   the collective that this line is: axis, bytes that this rank sends, reason.
    places: does it take places, such as those of rows, which may be out of range?
    """

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[int | None, ...]
    several: bool
    where: str
    number: str = ""
    sent: tuple[Any, ...] = ()
    places: bool = False

    @property
    def name(self) -> str:
        """What is called, as it is printed."""
        call = self.call
        return str(call) if isinstance(call, torch._ops.OpOverload) else getattr(call, "__name__", str(call))

    @property
    def only_computes(self) -> bool:
        """Is it an operator of tensors and constants that gives its results and does nothing else?"""
        call = self.call
        if not isinstance(call, torch._ops.OpOverload) or call.namespace == FUNCTIONAL:
            return False
        followed = any(isinstance(value, Number) for value in tree_leaves((self.args, self.kwargs)))
        return not (call._schema.is_mutable or self.draws or followed)

    @property
    def draws(self) -> bool:
        """Does it draw random numbers? An attention without dropout does not, whatever its tags say."""
        if torch.Tag.nondeterministic_seeded not in getattr(self.call, "tags", ()):
            return False
        for place, argument in enumerate(self.call._schema.arguments):  # type: ignore[attr-defined]
            if argument.name == "dropout_p":
                given = self.args[place:] or [self.kwargs.get("dropout_p", argument.default_value)]
                return bool(given[0])
        return True


@dataclass(slots=True, eq=False)
class Value:
    """A tensor of the program. source: where a replay finds it, None for what a line makes.

    varies: does it depend on what is given, on random numbers or on other ranks? What does not is the same
        in every replay, and may be read.
    """

    tensor: torch.Tensor
    source: Any = None
    varies: bool = True


def refs_of(line: Line) -> list[int]:
    """The values that a line takes."""
    return [value.number for value in tree_leaves((line.args, line.kwargs)) if isinstance(value, Ref)]


Answers = dict[int, torch.Tensor]  # of collectives, by their number in the call


class OtherwiseError(EraseError):
    """A replay reads something else than its recording. answers: of its collectives, where it was undone."""

    answers: Answers | None = None


def expect(x: torch.Tensor, values: list[Any]) -> None:
    """Raise where the host would read something else than when the program was recorded."""
    if x.tolist() != values:
        raise OtherwiseError(
            "the ranks told each other something else than when this program was recorded (which of them "
            "have which gradients, say)\n  fix: run the same backward passes on all ranks"
        )


def kept_state() -> torch.Tensor:
    """Where the generator of the CPU stands, for `put_back`: `torch.utils.checkpoint` keeps it."""
    return torch.default_generator.get_state()


def put_back(state: torch.Tensor) -> None:
    """Let the generator of the CPU stand there again."""
    torch.default_generator.set_state(state)


_LONGEST_LIST = 4096
_MOST_LINES = 32  # of a question
Geometry = tuple[Any, ...]


@dataclass(slots=True, eq=False)
class Tape:
    """Lines, and the values that they make and take. names: what the texts of numbers name."""

    lines: list[Line] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    _by_id: dict[int, int] = field(default_factory=dict)
    _lay: dict[int, int | None] = field(default_factory=dict)  # in which storage, by `id`
    _by_memory: dict[Geometry, int] = field(default_factory=dict)
    _storages: dict[int, list[int]] = field(default_factory=dict)  # the values that lie there

    def enter(self, x: torch.Tensor, source: Any = None, *, varies: bool = True) -> int:
        """A new value, which is this tensor from now on."""
        number, memory = len(self.values), _memory(x)
        if memory is not None:
            self._by_memory[memory] = number
            self._storages.setdefault(memory[0], []).append(number)
        self._by_id[id(x)], self._lay[id(x)] = number, None if memory is None else memory[0]
        self.values.append(Value(x, source, varies))
        return number

    def copied(self, number: int) -> None:
        """Keep what a value is now: the call may write into its memory."""
        value = self.values[number]
        self.values.append(Value(value.tensor, varies=False))  # held, so that nothing takes its `id`
        value.tensor = value.tensor.clone()

    def is_made_of_others(self, data: torch.Tensor) -> bool:
        """Has torch read it from tensors in a list? No operator shows that, but the list is there."""
        if not data.dim() or not 0 < data.numel() <= _LONGEST_LIST:
            return False
        rows = data.reshape(-1, data.shape[-1]).tolist()
        numbers = set(itertools.chain(*rows))
        found = [v.tensor for v in self.values if v.varies and _number_in(v.tensor) in numbers]
        holders = (x for x in gc.get_referrers(*found) if isinstance(x, list | tuple)) if found else ()
        return any(x is not found and [*map(_number_in, x)] in rows for x in holders)

    def vary(self, number: int) -> None:
        """A value was written with what may be another in a replay: so is all that lies in its storage."""
        memory = _memory(self.values[number].tensor)
        beside = self._storages.get(memory[0], ()) if memory is not None else ()
        for each in (number, *beside):
            self.values[each].varies = True

    def find(self, x: torch.Tensor) -> int | None:
        """The number of a tensor, None if the tape does not know it."""
        number = self._by_id.get(id(x))
        if number is not None and self._lay[id(x)] == _storage(x):  # not after `x.data = y`
            return number
        memory = _memory(x)
        if memory is None:
            return None
        number = self._by_memory.get(memory)
        if number is None:
            number = self._seen_otherwise(x, memory[0])
        if number is not None:
            self._by_id[id(x)], self._lay[id(x)] = number, memory[0]
            self.values.append(Value(x, varies=False))  # held, so that nothing takes its `id`
        return number

    def knows(self, x: torch.Tensor) -> bool:
        """Is this very object a value?"""
        return id(x) in self._by_id

    def expect(self, x: torch.Tensor) -> None:
        """The values are read: a replay compares them with what they are now."""
        number = self.find(x)
        if number is not None:
            self.lines.append(Line(expect, (Ref(number), x.tolist()), {}, (), False, ""))

    def forget(self, x: torch.Tensor) -> None:
        """From now on this object is another value."""
        self._by_id.pop(id(x), None)

    def _seen_otherwise(self, x: torch.Tensor, storage: int) -> int | None:
        """A known storage, seen with other sizes or strides by code that no operator showed."""
        there = self._storages.get(storage)
        if not there or x.is_conj() or x.is_neg():
            return None
        first = there[0]
        known = self.values[first]
        if known.tensor.dtype != x.dtype or known.tensor.is_conj() or known.tensor.is_neg():
            return None
        args = (Ref(first), list(x.shape), list(x.stride()), x.storage_offset())
        number = self.enter(x, varies=known.varies)
        self.lines.append(Line(torch.ops.aten.as_strided.default, args, {}, (number,), False, ""))
        return number

    def question(self, number: int) -> list[Line] | None:
        """The lines that make a value of what is there when the call begins: a guard may run them.

        None where they are many, draw or send, or where the call has written what they read.
        """
        makers = {out: line for line in self.lines for out in line.outs}
        found, values = dict[int, Line](), [number]
        for each in values:  # which grows
            line = makers.get(each)
            if line is not None and id(line) not in found:
                found[id(line)] = line
                values += refs_of(line)
            elif line is None and not isinstance(self.values[each].source, Given | Held | Gradient | str):
                return None
            if len(found) > _MOST_LINES or (line is not None and not line.only_computes):
                return None
        written = {self.storage_of(each) for line in self.lines for each in written_by(line)}
        return [*found.values()] if written.isdisjoint(map(self.storage_of, values)) else None

    def storage_of(self, number: int) -> int | None:
        """A number for the storage of a value, None for one that has none, as sparse ones."""
        return _storage(self.values[number].tensor)

    def settle(self, kept: set[int]) -> None:
        """Let go of all tensors but these: of the others only sizes and dtypes are asked from now on."""
        for number, value in enumerate(self.values):
            if number not in kept:
                value.tensor = torch.empty(value.tensor.shape, dtype=value.tensor.dtype, device="meta")
        for table in (self._by_id, self._lay, self._by_memory, self._storages):
            table.clear()

    def varies(self, x: torch.Tensor) -> bool:
        """May the values of a tensor be others in a replay? What the tape does not know is not asked here."""
        number = self.find(x)
        return number is not None and self.values[number].varies


def written_by(line: Line) -> list[int]:
    """The values that a line writes in place."""
    if not isinstance(line.call, torch._ops.OpOverload) or not line.call._schema.is_mutable:
        return []
    written = flat(written_among(line.call, line.args, line.kwargs))
    return [value.number for value in written if isinstance(value, Ref)]


def _number_in(x: Any) -> Any:
    """That of a tensor with one element, and what is one; None of anything else."""
    if isinstance(x, torch.Tensor):
        return x.item() if x.layout is torch.strided and x.numel() == 1 else None
    return x if isinstance(x, bool | int | float | complex) else None


def _storage(x: torch.Tensor) -> int | None:
    """Its storage, as a number; None of a tensor that has none or several."""
    strided = x.layout is torch.strided and not x.is_nested
    return int(x.untyped_storage()._cdata) if strided else None


def _memory(x: torch.Tensor) -> Geometry | None:
    """What two objects of one tensor have in common."""
    if _storage(x) is None:
        return None
    return _storage(x), x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()

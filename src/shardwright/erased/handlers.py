"""Which errors a place of a program catches, read from its code.

The table of a code says for each instruction where an error goes that is raised there. From there the code is
followed as the interpreter would: past clauses that do not match, out of a `finally` or the end of a `with`
block into what stands around them. A clause that may match is an end: what it does, a replay would not.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

Path = tuple[str, ...]  # a name and its attributes
Clause = tuple[Path, ...] | None  # the classes of an `except`; None: any, or nobody knows

# What operators raise by what they are given.
_RAISED = (RuntimeError, IndexError, ValueError, ArithmeticError, MemoryError)
_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "CHECK_EG_MATCH"})
_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})


@dataclass(frozen=True, slots=True)
class Handlers:
    """What an error meets in one frame. with_block: also the end of such a block, which may swallow it."""

    clauses: tuple[Clause, ...] = ()
    with_block: bool = False


def handlers_at(code: CodeType, offset: int) -> Handlers:
    """What an error meets that is raised at this offset of a code."""
    table = tuple(_table(code))
    if _target(table, offset) is None:
        return Handlers()
    return _Walk(code, table).handlers(offset)


def yields_of(code: CodeType) -> dict[int, Handlers]:
    """Where a generator waits, and what an error meets that is thrown into it there.

    From Python 3.13 on it stands at the instruction behind its `yield`.
    """
    waits = [each.offset for each in dis.get_instructions(code) if each.opname == "YIELD_VALUE"]
    return {place: handlers_at(code, place) for offset in waits for place in (offset, offset + 2)}


def may_catch(clause: Clause, names: Mapping[str, Any], builtins: Mapping[str, Any], *, of_any: bool) -> bool:
    """May an error of an operator match a clause? of_any: one that raises what it likes."""
    if clause is None or of_any:
        return True
    return any(_may_match(_found(path, names, builtins)) for path in clause)


def matches_any(classes: Any) -> bool:
    """May an error of an operator be of one of these classes?"""
    return any(map(_may_match, classes)) if isinstance(classes, tuple) else _may_match(classes)


def may_swallow(code: CodeType) -> bool:
    """May an `__exit__` of this code take the error, or raise another? Not where each result is false."""
    before = ""
    for each in dis.get_instructions(code):
        if each.opname == "RETURN_VALUE" and before != "LOAD_CONST false":
            return True
        if each.opname == "RAISE_VARARGS" or (each.opname == "RETURN_CONST" and each.argval):
            return True
        if each.opname != "CACHE":
            before = each.opname + ("" if each.argval else " false")
    return False


def _may_match(found: Any) -> bool:
    if isinstance(found, tuple):
        return any(map(_may_match, found))
    if not isinstance(found, type):
        return True
    return any(issubclass(error, found) or issubclass(found, error) for error in _RAISED)


def _found(path: Path, names: Mapping[str, Any], builtins: Mapping[str, Any]) -> Any:
    """The class of this name now, None where nobody knows."""
    value = names.get(path[0], builtins.get(path[0]))
    for name in path[1:]:
        value = getattr(value, name, None)
    return value


# ---------------------------------------------------------------------------------------- the table of a code


def _table(code: CodeType) -> Iterator[tuple[int, int, int]]:
    """Start, end and target of each protected range: the format of CPython's exception_handling_notes."""
    left = iter(code.co_exceptiontable)
    for first in left:
        start = _number(first, left)
        length, target, _ = (_number(next(left), left) for _ in range(3))
        yield 2 * start, 2 * (start + length), 2 * target


def _number(byte: int, left: Iterator[int]) -> int:
    """Six bits a byte; another byte follows where the seventh is set."""
    value = byte & 63
    while byte & 64:
        byte = next(left)
        value = value << 6 | byte & 63
    return value


def _target(table: Sequence[tuple[int, int, int]], offset: int) -> int | None:
    return next((target for start, end, target in table if start <= offset < end), None)


class _Walk:
    """From where an error is raised to all that may catch it in one code."""

    def __init__(self, code: CodeType, table: Sequence[tuple[int, int, int]]) -> None:
        self._table = table
        self._lines = list(dis.get_instructions(code))
        self._place = {each.offset: place for place, each in enumerate(self._lines)}
        self._seen: set[int] = set()
        self._todo: list[int] = []
        self._clauses: list[Clause] = []
        self._with = False

    def handlers(self, offset: int) -> Handlers:
        """What an error meets that is raised here."""
        self._raised(offset)
        while self._todo:
            self._follow(self._todo.pop())
        return Handlers(tuple(dict.fromkeys(self._clauses)), self._with)

    def _raised(self, offset: int) -> None:
        target = _target(self._table, offset)
        if target is not None:
            self._todo.append(target)

    def _follow(self, offset: int) -> None:
        """Straight on to a jump or an end."""
        place, stack = self._place[offset], list[Clause]()
        while place not in self._seen:
            self._seen.add(place)
            each = self._lines[place]
            if self._ends(each, place, stack):
                return
            if each.opname == "WITH_EXCEPT_START":  # who swallows it is asked as it ends
                self._with = True
                place = self._jump_after(place)
            elif each.opcode in _JUMPS:
                self._todo.append(each.argval)
                if each.opname.startswith("JUMP_"):
                    return
            else:
                _push(each, stack)
            place += 1

    def _ends(self, each: dis.Instruction, place: int, stack: list[Clause]) -> bool:
        name = each.opname
        if name == "RERAISE":
            self._raised(each.offset)
        elif name in _ENDS or (name == "POP_EXCEPT" and self._lines[place + 1].opname != "RERAISE"):
            self._clauses.append(None)
        elif name == "CHECK_EXC_MATCH":
            self._clauses.append(stack[-1] if stack else None)
            self._todo.append(self._lines[self._jump_after(place)].argval)
        else:
            return False
        return True

    def _jump_after(self, place: int) -> int:
        while self._lines[place].opcode not in _JUMPS or "IF" not in self._lines[place].opname:
            place += 1
        return place


def _push(each: dis.Instruction, stack: list[Clause]) -> None:
    """What an `except` compares with, as far as it is made of names."""
    if each.opname == "LOAD_GLOBAL":
        stack.append(((each.argval,),))
    elif each.opname == "LOAD_ATTR" and stack and stack[-1] is not None and len(stack[-1]) == 1:
        stack[-1] = ((*stack[-1][0], each.argval),)
    elif each.opname == "BUILD_TUPLE" and None not in stack[-each.argval :] and len(stack) >= each.argval > 0:
        classes = [path for clause in stack[-each.argval :] for path in clause or ()]
        stack[:] = [tuple(classes)]
    elif each.opname not in {"CACHE", "PRECALL", "EXTENDED_ARG", "NOT_TAKEN"}:
        stack[:] = [None]

"""The local program: straight-line code over plain tensors, made of a tape.

Lines that nobody needs are left out; what writes, draws, sends or may raise by places stays, in its order.
A value is let go after its last use, so that a replay holds what the call held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwright.compat import tree_map_only
from shardwright.erased.operands import FUNCTIONAL
from shardwright.erased.otherwise import Undo
from shardwright.erased.record import DATA
from shardwright.erased.sources import Held
from shardwright.erased.tape import Line, Number, Ref, Tape, kept_state, put_back, refs_of

_ALIASES = frozenset({"aten::detach", "aten::alias", "aten::lift", "aten::detach_"})
_LITERALS = frozenset({type(None), bool, int, str})


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Lines, as a function of local tensors.

    lines:   what runs, in order.
    takes:   the values that are passed in.
    gives:   the values that come back.
    holds:   the values that are constants of the program: local tensors of parameters and states.
    undo:    what a run has to keep, where it may go otherwise.
    run:     the function; with `undo` it takes a dict for answers, too.
    """

    tape: Tape
    lines: tuple[Line, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    holds: tuple[int, ...]
    undo: Undo | None
    run: Callable[..., tuple[Any, ...]]


def needed(lines: Sequence[Line], gives: Sequence[int]) -> tuple[list[Line], set[int]]:
    """The lines that matter, and the values that they take without making them."""
    wanted = set(gives)
    kept: list[Line] = []
    for line in reversed(lines):
        if line.number or _acts(line) or any(out in wanted for out in line.outs):
            kept.append(line)
            wanted.update(refs_of(line))
    kept.reverse()
    made = {out for line in kept for out in line.outs}
    return kept, {number for number in wanted if number not in made}


def is_check(line: Line) -> bool:
    """Is it called for the error that it may raise, and gives nothing?"""
    call = line.call
    if not isinstance(call, torch._ops.OpOverload) or call.namespace != "aten":  # marks of a profiler, say
        return False
    return not (call._schema.returns or call._schema.is_mutable)


def _acts(line: Line) -> bool:
    """Does it do more than give its results?"""
    call = line.call
    if not isinstance(call, torch._ops.OpOverload):
        return True
    if call.namespace == FUNCTIONAL or line.draws or line.places:
        return True
    return call._schema.is_mutable or is_check(line)


def program_of(
    tape: Tape,
    lines: Sequence[Line],
    gives: Sequence[int],
    takes: Sequence[int] | None = None,
    *,
    whole: bool = False,
) -> Program:
    """The function of these lines.

    Args:
        takes: values that are passed in, in this order; None: those that are needed and not held.
        whole: all lines of a call from its beginning, which can be undone then.
    """
    if not any(line.draws for line in tape.lines):  # then nobody needs to know where generators stood
        lines = [line for line in lines if line.call not in (kept_state, put_back)]
    aliases = _aliases_among(lines, gives)
    lines = [_renamed(line, aliases) for line in lines if not (line.outs and line.outs[0] in aliases)]
    kept, free = needed(lines, gives)
    holds = tuple(sorted(n for n in free if _is_held(tape, n)))
    if takes is None:
        takes = tuple(sorted(free - set(holds)))
    missing = free - set(holds) - set(takes)
    if missing:
        raise LookupError(f"no source for the values {sorted(missing)}")
    undo = Undo.of(tape, kept, takes, holds) if whole else None
    run = _compiled(tape, kept, tuple(takes), tuple(gives), holds, undo)
    return Program(tape, tuple(kept), tuple(takes), tuple(gives), holds, undo, run)


def _is_held(tape: Tape, number: int) -> bool:
    source = tape.values[number].source
    return isinstance(source, Held) or source == "constant"


def _aliases_among(lines: Sequence[Line], gives: Sequence[int]) -> dict[int, int]:
    """Values that are another one under a new object: `detach`, which autograd writes everywhere."""
    found: dict[int, int] = {}
    for line in lines:
        call = line.call
        if isinstance(call, torch._ops.OpOverload) and call._schema.name in _ALIASES:
            out = line.outs[0]
            if out is not None and out not in gives:
                source = line.args[0].number
                found[out] = found.get(source, source)
    return found


def _renamed(line: Line, aliases: dict[int, int]) -> Line:
    if not any(number in aliases for number in refs_of(line)):
        return line

    def rename(ref: Ref) -> Ref:
        return Ref(aliases.get(ref.number, ref.number))

    args, kwargs = tree_map_only(Ref, rename, (line.args, line.kwargs))
    return replace(line, args=args, kwargs=kwargs)


# ------------------------------------------------------------------------------------------------- the code


def _compiled(
    tape: Tape,
    lines: Sequence[Line],
    takes: tuple[int, ...],
    gives: tuple[int, ...],
    holds: tuple[int, ...],
    undo: Undo | None,
) -> Callable[..., tuple[Any, ...]]:
    names: dict[str, Any] = {f"v{n}": tape.values[n].tensor for n in holds} | tape.names
    written = _Writer(names)
    last = _last_uses(lines, {*gives, *holds})
    keeps = {} if undo is None else undo.keeps
    given = [f"v{n}" for n in takes] + ([] if undo is None else ["answers"])
    text = [f"def run({', '.join(given)}):"]
    for place, line in enumerate(lines):
        text.append("    " + written.line(line))
        text += [f"    {keeps[place]}"] if place in keeps else []
        dead = [f"v{n}" for n in last.get(place, ())]
        if dead:
            text.append(f"    {' = '.join(dead)} = None")
    text.append(f"    return ({''.join(f'v{n}, ' for n in gives)})")
    run: Callable[..., tuple[Any, ...]] = compiled("\n".join(text), names, "run")
    return run


def compiled(text: str, names: dict[str, Any], name: str) -> Any:
    """A function from its source, with these names as its globals."""
    code = compile(text, "<erased program>", "exec")
    exec(code, names)  # noqa: S102 - the text is written here, of operators and numbers of values
    return names[name]


def _last_uses(lines: Sequence[Line], forever: set[int]) -> dict[int, list[int]]:
    """After which line each value is let go."""
    last: dict[int, int] = {}
    for place, line in enumerate(lines):
        for number in (*refs_of(line), *(out for out in line.outs if out is not None)):
            last[number] = place
    found: dict[int, list[int]] = {}
    for number, place in last.items():
        if number not in forever:
            found.setdefault(place, []).append(number)
    return found


class _Writer:
    """Lines as Python; what has no text of its own becomes a name."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names
        self._of: dict[int, str] = {}

    def line(self, line: Line) -> str:
        if line.number:
            return f"{line.number} = {self.value(line.args[0])}.item()"
        call: Any = line.call
        args = [self.value(value) for value in line.args]
        args += [f"{name}={self.value(value)}" for name, value in line.kwargs.items()]
        if isinstance(call, torch._ops.OpOverload) and call._schema.name == DATA:
            text = f"{args[0]}.clone()"
        else:
            run = call._op if isinstance(call, torch._ops.OpOverload) else call
            text = f"{self.named(run, 'f')}({', '.join(args)})"
        return _assigned(line, text)

    def value(self, value: Any) -> str:
        if isinstance(value, Ref):
            return f"v{value.number}"
        if isinstance(value, Number):
            return value.text
        if isinstance(value, list | tuple):
            inside = "".join(f"{self.value(v)}, " for v in value)
            return f"[{inside}]"
        if type(value) in _LITERALS or (type(value) is float and math.isfinite(value)):
            return repr(value)
        return self.named(value, "c")

    def named(self, value: Any, letter: str) -> str:
        name = self._of.get(id(value))
        if name is None:
            name = self._of[id(value)] = f"{letter}{len(self._of)}"
            self.names[name] = value
        return name


def _assigned(line: Line, text: str) -> str:
    if not any(out is not None for out in line.outs):
        return text
    outs = ["_" if out is None else f"v{out}" for out in line.outs]
    return f"{outs[0]} = {text}" if not line.several else f"({', '.join(outs)}, ) = {text}"

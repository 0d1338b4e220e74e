"""The local program as text: what this rank does, with what it sends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwright.erased.program import FUNCTIONAL
from shardwright.erased.sources import Given, Gradient, Held, Tangent
from shardwright.erased.tape import Number, Ref

if TYPE_CHECKING:
    from shardwright.erased.program import Program
    from shardwright.erased.tape import Line, Tape

_DTYPES = {
    torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.int64: "i64", torch.int32: "i32", torch.bool: "bool",
}  # fmt: skip


def of_program(program: Program, title: str) -> str:
    """One line per call; a collective says its axis, what this rank sends, and why."""
    sends = [line.sent for line in program.lines if line.sent]
    count, sent = len(sends), sum(each[2] for each in sends)
    head = f"{title}: {len(program.lines)} calls, {count} collectives, {sent} B sent by this rank"
    names = _Names(program.tape)
    used = [*program.takes, *program.holds]
    inputs = [f"  {names.of(n):<8}{_shape(program.tape, n):<16}{_from(program.tape, n)}" for n in used]
    body = [_line(line, names, program.tape) for line in program.lines]
    gives = ", ".join(names.of(n) for n in program.gives)
    return "\n".join([head, *inputs, *body, f"  return {gives}" if gives else "  return"])


class _Names:
    """Values are counted as they are met: numbers of the tape would have gaps."""

    def __init__(self, tape: Tape) -> None:
        self._tape, self._numbers = tape, dict[int, str]()

    def of(self, number: int) -> str:
        source = self._tape.values[number].source
        letter = "p" if isinstance(source, Held) else "x" if isinstance(source, Given) else "v"
        return self._numbers.setdefault(number, f"{letter}{len(self._numbers)}")


def _from(tape: Tape, number: int) -> str:
    source = tape.values[number].source
    match source:
        case Held(path=path):
            return path
        case Given(leaf=leaf):
            return f"argument {leaf}"
        case Gradient(path=path):
            return f"{path}.grad"
        case Tangent(result=result):
            return f"gradient of result {result}"
        case _:
            return "a constant" if source == "constant" else "from the forward"


def _shape(tape: Tape, number: int) -> str:
    x = tape.values[number].tensor
    dtype = _DTYPES.get(x.dtype, str(x.dtype).removeprefix("torch."))
    return f"{dtype}{list(x.shape)}"


def _line(line: Line, names: _Names, tape: Tape) -> str:
    if line.number:
        return f"  {line.number} = {_value(line.args[0], names)}.item()"
    call: Any = line.call
    is_op = isinstance(call, torch._ops.OpOverload)  # else a function of Python, as marks of a profiler are
    name = (call._schema.name if is_op else call.__name__).removeprefix("aten::")
    name = name.removeprefix(f"{FUNCTIONAL}::")
    args = [_value(value, names) for value in line.args]
    args += [f"{key}={_value(value, names)}" for key, value in line.kwargs.items()]
    outs = [names.of(out) for out in line.outs if out is not None]
    made = f"{', '.join(outs)} = " if outs else ""
    shape = _shape(tape, line.outs[0]) if line.outs and line.outs[0] is not None else ""
    said = f"  {made}{name}({', '.join(args)})"
    if line.sent:
        op, axis, sent, reason = line.sent
        return f"{said:<56}  # {shape}  {op} over {axis}, {sent} B: {reason}"
    return f"{said:<56}  # {shape}" if shape else said


def _value(value: Any, names: _Names) -> str:
    if isinstance(value, Ref):
        return names.of(value.number)
    if isinstance(value, Number):
        return value.text
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(v, names) for v in value)}]"
    return str(value)

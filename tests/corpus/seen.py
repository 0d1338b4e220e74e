"""What a user sees of a call, as text: layouts of results, what one rank sent and why, or the error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import shardwright as sw

_BREAK = "\n"
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
_SPACE = re.compile(r"\s+")
# The kernel met values that it cannot take. They are made up here, so what it says of them is no fact.
_OF_VALUES = (torch.linalg.LinAlgError,)


def seen(call: Callable[[], Any]) -> str:
    """Run a call and tell all of it in one line."""
    told = ""
    with sw.trace() as trace:
        try:
            told = results(call())
        except Exception as error:  # noqa: BLE001 - an error is what the user sees
            told = f"raises {error_text(error)}"
    return " | ".join([told, *sent(trace), *decided(trace)])


def results(tree: Any) -> str:
    """The layouts of all results, in order."""
    return f"-> {', '.join(map(_result, tree_leaves(tree)))}"


def _result(value: Any) -> str:
    if isinstance(value, DTensor):
        return str(sw.layout_of(value))
    if isinstance(value, torch.Tensor):
        return f"plain {_dtype(value.dtype)}{list(value.shape)}"
    return "None" if value is None else type(value).__name__


def sent(trace: Any) -> Iterable[str]:
    """Each collective of this rank, in order."""
    return (f"{e.op} {e.axis} {e.bytes_sent} B: {one_line(e.reason)}" for e in trace.collectives)


def decided(trace: Any) -> Iterable[str]:
    """Each decision, in order."""
    for d in trace.decisions:
        yield f"{d.op}: {one_line(d.reason)}" + (f": {one_line(d.details)}" if d.details else "")


def error_text(error: BaseException, *, whole: bool = False) -> str:
    """Its type and the first line of what it says, or all of it."""
    kind = type(error).__name__
    if isinstance(error, _OF_VALUES):
        return f"{kind} of values"
    text = str(error).strip()
    return f"{kind}: {one_line(text if whole else text.partition(_BREAK)[0])}"


def one_line(text: str) -> str:
    """Without line breaks, and without addresses of objects."""
    return _ADDRESS.sub("0x...", _SPACE.sub(" ", text.strip()))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def arguments_text(args: Iterable[Any], kwargs: dict[str, Any]) -> str:
    """Operands and scalars of a call, in words: `f32[3, 4], dim=1`."""
    named = [f"{name}={_argument(value)}" for name, value in kwargs.items()]
    return ", ".join([*map(_argument, args), *named])


def _argument(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        lies = "" if value.is_contiguous() else f" stride {list(value.stride())}"
        return f"{_dtype(value.dtype)}{list(value.shape)}{lies}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_argument, value))}]"
    return one_line(getattr(value, "__name__", None) or repr(value))

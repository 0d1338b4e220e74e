"""Every `_foreach_` op of torch on lists of unlike layouts, in place and not."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import shardwright as sw
from tests.corpus.seen import seen
from tests.corpus.unit import Case, Sizes, Unit
from tests.views.placed import place

_SHAPES = ((4, 6), (5, 2))
_R, _ROWS, _SUM = sw.Replicate(), sw.Shard(0), sw.Partial()
# Placements of the positions of the first list, and those of the others.
_PLACED = (
    ((_ROWS, _ROWS), (_ROWS, _ROWS)),
    ((_ROWS, _SUM), (_ROWS, _SUM)),
    ((_SUM, _R), (_R, _ROWS)),
    ((sw.Shard(1), _ROWS), (_ROWS, sw.Interleaved(0, 2))),
    ((_R, _R), (_SUM, _SUM)),
)
_NUMBERS = {"int": 2, "float": 0.5, "number": 1.5, "bool": False, "Scalar": 1.5}


def units() -> Iterator[Unit]:
    """One for each op."""
    for name in sorted(name for name in dir(torch) if name.startswith("_foreach_")):
        yield Unit("lists", name, ((2,),), partial(_cases, name))


def _cases(name: str, _: Sizes) -> Iterator[Case]:
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return
    for overload in sorted(packet.overloads()):
        op = getattr(packet, overload)
        if "out" not in overload:
            for first, others in _PLACED:
                words = f"{op.name()} {first} {others}"
                yield Case(words, partial(seen, partial(_run, op, first, others)))


def _run(op: Any, first: Any, others: Any) -> Any:
    arguments = [_argument(str(a.type), first if i == 0 else others) for i, a in _required(op)]
    result = op(*arguments)
    return result, [value for value in arguments if isinstance(value, list)]


def _required(op: Any) -> list[tuple[int, Any]]:
    stated = [a for a in op._schema.arguments if not a.kwarg_only and not a.has_default_value()]
    return list(enumerate(stated))


def _argument(kind: str, placements: Any) -> Any:
    if kind == "List[Tensor]":
        whole = [torch.arange(1.0, 1 + torch.Size(s).numel()).view(s) for s in _SHAPES]
        return [place(x, (p,), None) for x, p in zip(whole, placements, strict=True)]
    if kind.startswith("List["):
        return [_NUMBERS[kind[5:-1]]] * len(_SHAPES)
    return torch.tensor(2.0) if kind == "Tensor" else _NUMBERS[kind]

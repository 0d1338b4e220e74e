"""Where an activation lives at the border of a module: the few things that no parameter can say.

Hooks, by torch's own `register_forward_hook`: an embedding finishes what it looked up, and between blocks the
stream is cut and gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.compat import axis_names
from shardwright.compat.dynamo import never_compiled_alone
from shardwright.placement.base import Placement, Replicate
from shardwright.placement.shard import Shard
from shardwright.plan.decide import is_slow
from shardwright.tensor.dtensor import DTensor

_SEQUENCE = 1  # of [rows, tokens, features]
_NOT_CUT = Replicate()
_Hand = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Border:
    """What happens to the stream at one module.

    Args:
        gathers: what it is handed has all tokens.
        leaves: what it returns has this rank's.
        cuts: what it is handed has this rank's tokens.
        finishes: what it looked up, and its gradient, is finished, if that sends less than its table would.
        shared: what it was handed was gathered for another part of its block already, perhaps.
        beside: what it is handed beside the stream, as what an encoder made, is gathered once for all blocks.
    """

    gathers: bool = False
    leaves: bool = False
    cuts: bool = False
    finishes: bool = False
    shared: Gathered | None = field(default=None, compare=False)
    beside: Gathered | None = field(default=None, compare=False)


class Gathered:
    """A stream that several parts of a module read: gathered for the first of them, while the module runs."""

    def __init__(self, module: nn.Module) -> None:
        self._last: tuple[Any, ...] = ()
        self._runs, self._module = False, module

    def hang(self) -> None:
        """Begin to see when the module runs."""
        self._module.register_forward_pre_hook(partial(self._begin, True))
        self._module.register_forward_hook(partial(self._begin, False), always_call=True)

    def of(self, axis: str, value: Any) -> Any:
        """`_whole` of the value, made once."""
        if not self._runs or not isinstance(value, DTensor) or torch.compiler.is_compiling():
            return _whole(axis, value)
        asked = (value._version, torch.is_grad_enabled())
        if self._last and self._last[0] is value and self._last[1] == asked:
            return self._last[2]
        self._last = value, asked, _whole(axis, value)
        return self._last[2]

    def _begin(self, runs: bool, *_: Any) -> None:
        self._last, self._runs = (), runs


Borders = dict[nn.Module, Border]


def of_embeddings(module: nn.Module) -> Borders:
    """Embeddings: what is looked up, or its gradient, is finished where its table is larger.

    Of a table whose rows are cut a rank has the rows of its own tokens, and zeros: a pending sum. Its
    gradient, and that of a whole table, left pending, would make that of the table pending too, to be
    reduced in the size of the vocabulary.
    """
    return {child: Border(finishes=True) for child in module.modules() if isinstance(child, nn.Embedding)}


def hang(borders: Borders, mesh: DeviceMesh) -> None:
    """Hang the hooks that gather, cut and finish the stream on the modules."""
    (axis,) = axis_names(mesh)
    for hook in (_before, _after, _finished):  # a graph of a hook alone saves nothing
        never_compiled_alone(hook)
    for gathered in {each.shared for each in borders.values()} | {each.beside for each in borders.values()}:
        if gathered is not None:
            gathered.hang()
    for module, border in borders.items():
        if border.gathers or border.cuts or border.beside is not None:
            whole = _whole if border.shared is None else border.shared.of
            first = whole if border.gathers else _some if border.cuts else _as_it_is
            others = first if border.beside is None else border.beside.of
            module.register_forward_pre_hook(
                partial(_before, partial(first, axis), partial(others, axis)), with_kwargs=True
            )
        if border.leaves:
            module.register_forward_hook(partial(_after, axis), with_kwargs=True)
        elif border.finishes:
            module.register_forward_hook(partial(_finished, axis))


def _before(
    first: _Hand, others: _Hand, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The first stream is the one that goes through the module."""
    given, hand = [*args, *kwargs.values()], first
    for place, value in enumerate(given):
        if _is_stream(value):
            given[place], hand = hand(value), others
    return tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True))


def _after(axis: str, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    """The stream is what a module returns, or the first of it; rows and tokens may be one dim (Llama 4)."""
    if type(out) is tuple and out:
        return (_after(axis, part, args, kwargs, out[0]), *out[1:])
    shape = next((x.shape for x in (*args, *kwargs.values()) if _is_stream(x)), None)
    if shape is None or not isinstance(out, DTensor) or out.shape != (shape[0] * shape[1], shape[2]):
        return _some(axis, out)
    return _some(axis, out.view(shape)).flatten(0, 1)


def _whole(axis: str, value: Any) -> Any:
    """All tokens, of what has this rank's: on slow links while the first product of them is computed."""
    if _is_stream(value) and _placement(value, axis) == Shard(_SEQUENCE):
        in_parts = not torch.compiler.is_compiling() and is_slow(axis)
        return value.redistribute({axis: Replicate()}, async_op=in_parts)
    return value


def _as_it_is(_: str, value: Any) -> Any:
    return value


def _some(axis: str, value: Any) -> Any:
    """This rank's tokens, of what has all of them."""
    if _is_stream(value) and not _placement(value, axis).is_partition:
        return value.redistribute({axis: Shard(_SEQUENCE)})
    return value


def _finished(axis: str, table: nn.Module, _: tuple[Any, ...], out: Any) -> Any:
    """What was looked up, finished, so that its gradient is reduced and not the table's.

    An all-reduce of the one sends twice its size, the reduction of the other to its parts once.
    """
    rows = sum(p.numel() for p in table.parameters(recurse=False))
    if not isinstance(out, DTensor) or 2 * out.numel() >= rows:
        return out
    whole = _without_terms(axis, out)
    if not whole.requires_grad:
        return whole
    if torch.compiler.is_compiling():  # a graph has no hook: `from_local` finishes its gradient
        shape, stride = whole.shape, whole.stride()
        return DTensor.from_local(
            whole.to_local(), whole.device_mesh, whole.placements, shape=shape, stride=stride
        )
    out.register_hook(partial(_without_terms, axis))  # type: ignore[no-untyped-call]
    return whole


def _without_terms(axis: str, value: Any) -> Any:
    is_pending = isinstance(value, DTensor) and _placement(value, axis).is_pending
    return value.redistribute({axis: Replicate()}) if is_pending else value


def _is_stream(value: Any) -> bool:
    """Is it [rows, tokens, features]?"""
    return isinstance(value, DTensor) and value.ndim == 3 and value.dtype.is_floating_point


def _placement(value: DTensor, axis: str) -> Placement:
    axes = axis_names(value.device_mesh)  # not of its layout, at which graphs break
    return value.placements[axes.index(axis)] if axis in axes else _NOT_CUT

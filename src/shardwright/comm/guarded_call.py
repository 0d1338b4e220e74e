"""What a call of a process group is, in words that fit those of the other ranks if the calls fit.

Some collectives give every rank tensors of one shape; where one rank has more to say (the root has a list),
all of its tensors must be those of the others. In an all-to-all each pair of ranks agrees on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardwright.comm.tap import GroupCall
from shardwright.compat import tree_leaves

Pair = tuple[str, str]  # what goes to one other rank, and what comes from it
NOTHING: Pair = ("", "")


def words_of(call: GroupCall) -> str:
    """What all ranks must say alike: tensors, and the root."""
    words = _WORDS.get(call.name)
    root = _ROOTS.get(call.name)
    said = "" if words is None else f"{words(call)} "
    return said if root is None else f"{said}root {call.args[root]} "


def pairs_of(call: GroupCall) -> dict[int, Pair]:
    """What each other rank gets from this one and gives to it; of a collective where pairs differ."""
    if call.name not in _PAIRS:
        return {}
    sent, taken = _PAIRS[call.name](call)
    ranks = dist.get_process_group_ranks(call.group)
    return dict(zip(ranks, zip(sent, taken, strict=True), strict=True))


def _given(call: GroupCall) -> str:
    return ", ".join(map(_told, call.tensors))


def _told(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)}"


def _all_of_them(call: GroupCall) -> str:
    """Those that are given and those that are filled, of one shape on all ranks."""
    return " and ".join(sorted({_told(x) for x in tree_leaves(call.args[:2])}))


def _listed(many: int, one: int) -> Callable[[GroupCall], str]:
    """A tensor for each rank, at position `many`, and this rank's own, at `one`, which must fit its place."""

    def words(call: GroupCall) -> str:
        lists, own = call.args[many], call.args[one]
        told = ", ".join(_several(map(_told, each)) for each in lists)
        place = call.group.rank()
        odd = [x for each, x in zip(lists, own, strict=False) if each and each[place].numel() != x.numel()]
        return told + "".join(f" (and {_told(x)} at place {place})" for x in odd)

    return words


def _several(told: Iterable[str]) -> str:
    each = list(told)
    return f"{len(each)} x {each[0]}" if len(set(each)) == 1 else f"[{', '.join(each)}]"


def _rows(call: GroupCall) -> tuple[list[str], list[str]]:
    """An all-to-all of rows: how many elements go to each rank, and come from it."""
    out, given, _, out_splits, splits = call.args[:5]
    return _split(given, splits, call.group.size()), _split(out, out_splits, call.group.size())


def _split(x: Tensor, splits: Sequence[int], n: int) -> list[str]:
    rows = x.shape[0] if x.ndim else 1
    each = x.numel() // rows if rows else 0
    return [_elements(x, int(count) * each) for count in (splits or [rows // n] * n)]


def _elements(x: Tensor, count: int) -> str:
    return f"{count} of {x.dtype}" if count else "nothing"


def _lists(call: GroupCall) -> tuple[list[str], list[str]]:
    filled, given = call.args[:2]
    return [_elements(x, x.numel()) for x in given], [_elements(x, x.numel()) for x in filled]


_WORDS: Mapping[str, Callable[[GroupCall], str]] = MappingProxyType(
    {
        "allreduce_": _given,
        "allreduce_coalesced_": _given,
        "reduce_": _given,
        "broadcast_": _given,
        "_allgather_base_": _given,
        "allgather_into_tensor_coalesced_": _given,
        "_reduce_scatter_base_": _given,
        "reduce_scatter_tensor_coalesced_": _given,
        "scatter_": _all_of_them,
        "gather_": _all_of_them,
        "allgather_": _listed(0, 1),
        "reduce_scatter_": _listed(1, 0),
    }
)
_ROOTS: Mapping[str, int] = MappingProxyType({"broadcast_": 2, "reduce_": 3, "gather_": 3, "scatter_": 3})
_PAIRS: Mapping[str, Callable[[GroupCall], Any]] = MappingProxyType(
    {"alltoall_base_": _rows, "alltoall_": _lists}
)

"""The placements under which operators are tried, and a sample input placed so."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

import shardwright as sw

_NO_SUMS = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
Shape = tuple[int, ...]
Kind = Callable[[Shape, int], sw.Placement]


def _first(placement: Callable[[], sw.Placement]) -> Kind:
    """A placement of dim 0; a tensor without dims is replicated."""
    return lambda shape, n: placement() if shape else sw.Replicate()


def _uneven(shape: Shape, n: int) -> sw.Placement:
    """A shard of the first dim that the axis does not divide; where all divide, parts of unlike sizes."""
    dim = next((d for d, size in enumerate(shape) if size % n), None)
    if dim is not None:
        return sw.Shard(dim)
    return _ragged(shape, n)


def _ragged(shape: Shape, n: int) -> sw.Placement:
    return sw.Ragged(tuple(range(1, 2 * n, 2)), (0,)) if shape else sw.Replicate()


def _flat(shape: Shape, n: int) -> sw.Placement:
    return sw.Ragged(tuple(range(1, 2 * n, 2)), tuple(range(len(shape)))) if shape else sw.Replicate()


KINDS: dict[str, Kind] = {
    "Replicate": lambda shape, n: sw.Replicate(),
    "Shard(0)": _first(lambda: sw.Shard(0)),
    "Shard(-1)": lambda shape, n: sw.Shard(len(shape) - 1) if shape else sw.Replicate(),
    "uneven": _uneven,
    "Interleaved": _first(lambda: sw.Interleaved(0, 2)),
    "Ragged": _ragged,
    "Partial": lambda shape, n: sw.Partial("sum"),
}
MORE_KINDS: dict[str, Kind] = {
    "Owner": lambda shape, n: sw.Owner(n - 1),
    "ZigZag": _first(lambda: sw.ZigZag(0)),
    "BlockCyclic": _first(lambda: sw.BlockCyclic(0, 2)),
    "flat": _flat,
}
# Operands that are placed unlike one another: the kinds of the first, second, ... tensor, over again.
UNLIKE: dict[str, tuple[str, ...]] = {
    "unlike": ("Shard(0)", "Shard(-1)", "Partial", "Replicate", "Interleaved"),
    "unlike, pending": ("Partial", "Shard(0)", "Replicate", "Ragged", "Shard(-1)"),
    "unlike, whole": ("Replicate", "Partial", "Shard(-1)", "Shard(0)", "flat"),
}


def placements_for(kind: str, x: torch.Tensor, mesh: DeviceMesh, *, mixed: bool) -> list[sw.Placement]:
    """One placement per axis: the kind on each, or (`mixed`) on the first only."""
    make = {**KINDS, **MORE_KINDS}[UNLIKE.get(kind, (kind,))[0]]
    placed = [make(tuple(x.shape), mesh.size(axis)) for axis in range(mesh.ndim)]
    if mixed and mesh.ndim > 1:
        placed[1:] = [sw.Replicate()] * (mesh.ndim - 1)
    if x.dtype == torch.bool or x.dtype in _NO_SUMS:  # a sum of them has no meaning
        placed = [sw.Replicate() if p.is_partial() else p for p in placed]
    return placed


def place(x: torch.Tensor, mesh: DeviceMesh, placements: list[sw.Placement]) -> sw.DTensor:
    """The leaf DTensor of a whole tensor, with its strides and `requires_grad`."""
    grad, whole = x.requires_grad, x.detach()
    cut = [sw.Replicate() if p.is_partial() else p for p in placements]
    made = sw.distribute_tensor(whole, mesh, cut, src_data_rank=None)
    for axis, p in enumerate(placements):
        if p.is_partial():
            local = _term(made.to_local(), mesh.get_local_rank(axis))
            cut[axis] = p
            made = sw.DTensor.from_local(local, mesh, cut, shape=whole.shape, stride=whole.stride())
    return made.detach().requires_grad_(grad)


def _term(x: torch.Tensor, coord: int) -> torch.Tensor:
    """What a coord holds of a sum: 2x, -x, 0, ..., which add up without rounding.

    An op that is not linear shows, since no term is the value. Where doubling overflows, or the sign of a
    zero would be lost, the first coord holds the value and the others a zero of its sign.
    """
    if not x.numel() or x.dtype == torch.bool:
        return x.clone()
    zero = torch.zeros_like(x)
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        return (x + x, -x)[coord] if coord < 2 else zero
    plain = torch.view_as_real(x.resolve_conj()) if x.dtype.is_complex else x
    special = ~torch.isfinite(plain + plain) | (plain == 0)
    silent = torch.where(plain == 0, plain, torch.zeros_like(plain))
    doubled = (plain + plain, -plain)[coord] if coord < 2 else torch.zeros_like(plain)
    out = torch.where(special, plain if coord == 0 else silent, doubled)
    return torch.view_as_complex(out.contiguous()) if x.dtype.is_complex else out


def copied(tree: Any) -> Any:
    """Fresh leaves with the same values; a tensor that occurs twice is one tensor in the copy too."""
    return _mapped(tree, lambda x: x.detach().clone().requires_grad_(x.requires_grad))


def placed(tree: Any, kind: str, mesh: DeviceMesh, *, mixed: bool) -> Any:
    """The same arguments with every tensor a DTensor."""
    kinds = cycle(UNLIKE.get(kind, (kind,)))
    return _mapped(tree, lambda x: place(x, mesh, placements_for(next(kinds), x, mesh, mixed=mixed)))


def _mapped(tree: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    known: dict[int, torch.Tensor] = {}

    def convert(value: Any) -> Any:
        if isinstance(value, slice):
            return slice(*(convert(v) for v in (value.start, value.stop, value.step)))
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in known:
            known[id(value)] = function(value)
        return known[id(value)]

    return tree_map(convert, tree)

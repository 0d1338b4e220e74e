"""The ranks of a mesh tell each other what they hold, where nobody told them the logical tensor.

A rank that works out the logical shape from its own part alone gets another one than its peers as soon as the
parts are not equal; the next operation then sends what nobody expects. Not a check of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import DeviceMesh

from shardwright.comm.record import because
from shardwright.errors import LayoutError, PlacementError
from shardwright.index.stride import contiguous_stride
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import as_mesh_shape
from shardwright.placement.base import OWN_CLASSES, Partition
from shardwright.tensor.spec import coords_of

_DIMS = 64  # torch's limit
_SHOWN = 8
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)

Shape = tuple[int, ...]


class Held(NamedTuple):
    """What one rank says: its local shape and dtype, and a digest of how it says they are placed."""

    rank: int
    shape: Shape
    dtype: torch.dtype
    said: int


def told_by_all(local: torch.Tensor, mesh: DeviceMesh, said: object, reason: str) -> list[Held]:
    """What each rank of the mesh holds, in the order of the mesh; the same list on every rank.

    Args: said: what must be the same everywhere, in words.
    Cost: an all-gather of 536 bytes over each axis.
    """
    digest = xxhash.xxh3_64_intdigest(repr(said).encode()) >> 2
    row = [_DTYPES.index(local.dtype), digest, local.dim(), *local.shape]
    mine = torch.tensor(row + [0] * (_DIMS + 3 - len(row)), dtype=torch.int64, device=mesh.device_type)
    rows = mine.reshape(1, -1)
    shape, coords = as_mesh_shape(mesh), coords_of(mesh)
    for axis in reversed(range(mesh.ndim)):
        if mesh.size(axis) > 1 and coords is not None:
            group = mesh.get_group(axis)
            parts = {rank: rows.clone() for rank in dist.get_process_group_ranks(group)}
            with because(reason):
                dist.all_gather(list(parts.values()), rows, group=group)
            rows = torch.cat([parts[rank] for rank in shape.line(coords, axis)])
    return [
        Held(rank, tuple(sizes[:ndim]), _DTYPES[dtype], digest)
        for rank, (dtype, digest, ndim, *sizes) in zip(shape.ranks, rows.tolist(), strict=True)
    ]


def check_alike(told: Sequence[Held], what: str) -> None:
    """Raise LayoutError, the same on all ranks, unless dtypes, numbers of dims and placements agree."""
    for words, facts in (
        ("different dtypes", {held.dtype for held in told}),
        ("different numbers of dims", {len(held.shape) for held in told}),
        ("other placements, shape=, requires_grad or order of dims in memory", {held.said for held in told}),
    ):
        if len(facts) > 1:
            raise LayoutError(f"{what}: the ranks pass {words}\n{listed(told)}")


def check_stated(told: Sequence[Held], layout: Layout, what: str) -> None:
    """Raise LayoutError, the same on all ranks, unless each holds the part that a stated layout gives it."""
    if not fits(told, layout):
        expected = {held.rank: layout.local_shape(layout.coords_of(held.rank)) for held in told}
        raise LayoutError(
            f"{what}: the ranks do not hold the parts of {layout}\n{listed(told, expected)}"
            "\n  fix: pass on every rank the part that belongs there, or the right shape="
        )


def fits(told: Sequence[Held], layout: Layout) -> bool:
    """Whether each rank holds what the layout gives it."""
    return all(held.shape == layout.local_shape(layout.coords_of(held.rank)) for held in told)


def whole_of(
    told: Sequence[Held], mesh: DeviceMesh, placements: Sequence[object], dtype: torch.dtype
) -> Layout | None:
    """The layout of which the ranks hold the parts; None where there is none."""
    shape = _summed(told, mesh, placements)
    if shape is None:
        return None
    try:
        layout = Layout(mesh, tuple(placements), shape, dtype=dtype)
    except (LayoutError, PlacementError):
        return None
    return layout if fits(told, layout) else None


def _summed(told: Sequence[Held], mesh: DeviceMesh, placements: Sequence[object]) -> Shape | None:
    """Per dim the local lengths of the coords that cut it, one after the other."""
    known = as_mesh_shape(mesh)
    cut: dict[int, list[int]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partition):
            dim = cut_by(placement, told[0].shape, known.sizes[axis])
            if dim is None:
                return None
            cut.setdefault(dim, []).append(axis)
    shape = list(told[0].shape)
    for dim, axes in cut.items():
        sizes = (range(n) if axis in axes else range(1) for axis, n in enumerate(known.sizes))
        shape[dim] = sum(told[known.index_at(coords)].shape[dim] for coords in product(*sizes))
    return tuple(shape)


def cut_by(part: Partition, local: Shape, n: int) -> int | None:
    """The dim that a partition names by `dim`, from the front, if it cuts no other; else None.

    To a class of somebody else's the attribute may mean anything: it is asked about longer dims.
    """
    dim = getattr(part, "dim", None)
    if not isinstance(dim, int):
        return None
    dim %= max(len(local), 1)
    with suppress(Exception):  # it may not take such a tensor
        if type(part) not in OWN_CLASSES and set(part.cut_dims(tuple(n * s + 1 for s in local), n)) - {dim}:
            return None
    return dim


def refuse_unequal(told: Sequence[Held], guesses: Sequence[Shape], found: Layout | None, what: str) -> None:
    """Raise LayoutError, the same on all ranks, where parts of unequal shape are taken for equal ones."""
    taken = {held.rank: guess for held, guess in zip(told, guesses, strict=True)}
    fix = "fix: pass shape= and stride= of the whole tensor"
    if found is not None:
        stride = contiguous_stride(found.shape)
        fix = f"fix (checked): {what.partition('(')[0]}(..., shape={found.shape}, stride={stride})"
    raise LayoutError(
        f"{what}: without shape= every rank is taken to hold a part of equal shape, and they do not\n"
        f"{listed(told, taken, 'would be part of')}\n  {fix}"
    )


def listed(told: Sequence[Held], others: dict[int, Shape] | None = None, words: str = "should be") -> str:
    """The ranks and what they hold, one a line."""
    lines = [
        f"  rank {held.rank}  {str(held.dtype).removeprefix('torch.')} {held.shape}"
        + ("" if others is None else f"   {words} {others[held.rank]}")
        for held in told[:_SHOWN]
    ]
    more = [f"  and {len(told) - _SHOWN} more"] if len(told) > _SHOWN else []
    return "\n".join([*lines, *more])

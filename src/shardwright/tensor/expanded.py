"""Expanded tensors (stride 0) move as what they were expanded from: `[rows, 1]`, not `[rows, n]`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwright.layout.layout import Layout
from shardwright.placement.along_dim import states_runs
from shardwright.placement.base import OWN_CLASSES, Partition, Placement, Replicate
from shardwright.remember import remembered


def expanded_dims(layout: Layout) -> tuple[int, ...]:
    """The dims along which the logical tensor repeats one element."""
    if 0 not in layout.stride:
        return ()
    pairs = enumerate(zip(layout.shape, layout.stride, strict=True))
    return tuple([dim for dim, (size, stride) in pairs if size > 1 and stride == 0])


@remembered(4096)
def bases(source: Layout, target: Layout) -> tuple[Layout, Layout] | None:
    """Both layouts of what was expanded, of size 1 where it repeats; None where the parts do not tell it."""
    dims = expanded_dims(source)
    if not dims or 0 in source.shape:
        return None
    before = _kept(source, dims, must_hold=True)
    after = _kept(target, dims, must_hold=False)
    if before is None or after is None:
        return None
    shape = tuple(1 if dim in dims else size for dim, size in enumerate(source.shape))
    return _base(source, before, shape), _base(target, after, shape)


def _base(layout: Layout, placements: Sequence[Placement], shape: tuple[int, ...]) -> Layout:
    return Layout(layout.mesh_shape, placements, shape, dtype=layout.dtype, order=layout.order_names)


def _kept(layout: Layout, dims: tuple[int, ...], *, must_hold: bool) -> list[Placement] | None:
    """The placements without those that cut a repeated dim; None: it mixes dims, or may leave a coord out."""
    kept: list[Placement] = []
    for placement, n in zip(layout.placements, layout.sizes, strict=True):
        if not isinstance(placement, Partition):
            kept.append(placement)
            continue
        if not (type(placement) in OWN_CLASSES or states_runs(placement)):
            return None  # it may cut another dim of another shape
        cut = placement.cut_dims(layout.shape, n)
        if len(cut) > 1:
            return None
        if not cut or cut[0] not in dims:  # one coord has everything, or the dim stays
            kept.append(placement)
        elif must_hold:
            return None
        else:
            kept.append(Replicate())
    return kept


def base_of(local: torch.Tensor, repeated: Sequence[int]) -> torch.Tensor:
    """The local part of what was expanded along these dims."""
    for dim in repeated:
        local = local.narrow(dim, 0, min(1, local.shape[dim]))
    return local

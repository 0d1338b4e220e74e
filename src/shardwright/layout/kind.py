"""`Kind`: what layouts of tensors of different sizes have in common.

What is decided for one layout of a kind holds for all of them, as long as no size was looked at: so a program
whose shapes change from step to step (growing caches, batches of another length) is decided once.
Not a layout: it has no sizes.
"""

from __future__ import annotations

import torch

from shardwright.index.region import Shape
from shardwright.index.stride import stride_order
from shardwright.layout.arrangement import Arrangement
from shardwright.layout.mesh_shape import MeshShape
from shardwright.remember import memo


class Kind:
    """Mesh, placements, order and dtype; per dim whether its size is 0, 1 or more; the order of the strides.

    classes: per dim 0, 1 or 2 for more. rows: stored row by row. base_hash: the part of the hash of its
    layouts that sizes do not change.
    One object per kind: compared and hashed by identity.
    """

    __slots__ = ("arrangement", "base_hash", "classes", "dtype", "mesh_shape", "rows", "stride_order")

    def __init__(
        self,
        base_hash: int,
        mesh_shape: MeshShape,
        arrangement: Arrangement,
        dtype: torch.dtype,
        classes: tuple[int, ...],
        strides: tuple[int, ...],
    ) -> None:
        self.base_hash = base_hash
        self.mesh_shape = mesh_shape
        self.arrangement = arrangement
        self.dtype = dtype
        self.classes = classes
        self.stride_order = strides
        self.rows = strides == tuple(range(len(strides)))


_MANY = 65536
_known: dict[tuple[object, ...], Kind] = memo("kinds of layouts", {})


def find_kind(
    base_hash: int,
    mesh_shape: MeshShape,
    arrangement: Arrangement,
    dtype: torch.dtype,
    shape: Shape,
    stride: Shape,
) -> Kind | None:
    """The kind of the layout with these fields.

    None where sizes matter beyond the kind: a placement that looks at them, strides that are not dense.
    """
    placements, order = arrangement[:2]
    strides = stride_order(shape, stride)
    if strides is None or not arrangement.any_size:
        return None
    classes = tuple([min(2, size) for size in shape])
    key = (mesh_shape, placements, order, dtype, classes, strides)
    known = _known.get(key)
    if known is None:
        if len(_known) >= _MANY:
            _known.clear()
        known = _known[key] = Kind(base_hash, mesh_shape, arrangement, dtype, classes, strides)
    return known

"""`--mesh "dp=2,tp=4"`."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING

from shardwright.errors import MeshError

if TYPE_CHECKING:
    from shardwright.layout.mesh_shape import MeshShape

_MOST_RANKS = 1 << 20  # a plan names each of them, which takes half a minute for so many
_AXIS = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*(\d+)\s*")


def parse_mesh(text: str, *, option: str = "--mesh", first_rank: int = 0) -> MeshShape:
    """The mesh that `dp=2,tp=4` names, axes from left to right, of consecutive ranks.

    Raises: MeshError: an axis is not written as name=size, or there are too many ranks.
    """
    from shardwright.layout.mesh_shape import MeshShape  # here: --help must not wait for torch

    found = [_AXIS.fullmatch(part) for part in text.split(",")]
    wrong = next((part for part, axis in zip(text.split(","), found, strict=True) if axis is None), None)
    if wrong is not None:
        why = f'{wrong.strip()!r} is no axis; write name=size, as in "dp=2,tp=4"'
        raise MeshError(f"{option} {text!r}: {why}")
    axes = [axis for axis in found if axis is not None]
    sizes = [int(axis[2]) for axis in axes]
    if prod(sizes) > _MOST_RANKS:
        raise MeshError(f"{option} {text!r:.60} has more ranks than can be listed: {_MOST_RANKS:,} at most")
    return MeshShape([axis[1] for axis in axes], sizes, range(first_rank, first_rank + prod(sizes)))

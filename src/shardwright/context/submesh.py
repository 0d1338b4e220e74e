"""Slices of a mesh by axis name, with an error that helps."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwright.compat import axis_names
from shardwright.errors import MeshError, ShardwrightError, refuse_other_kind


def check_axis(mesh: DeviceMesh, axis: str) -> None:
    """Raise MeshError, with the nearest name, unless `mesh` has this axis."""
    names = axis_names(mesh)
    if axis in names:
        return
    near = difflib.get_close_matches(str(axis), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else "use one of them"
    raise MeshError(f"unknown axis {axis!r} of a mesh with axes ({', '.join(names)}); {hint}")


def as_names(given: Any) -> tuple[str, ...]:
    """Return the names of axes that a caller gave, one or several; what is no name is looked up as one."""
    alone = isinstance(given, str | type | Tensor) or not isinstance(given, Iterable)
    return (given,) if alone else tuple(given)


def submesh(mesh: DeviceMesh, axes: str | Sequence[str]) -> DeviceMesh:
    """Return the mesh of some axes, in the order of `mesh`: a view, no group is made.

    Raises:
        MeshError: an axis is unknown, named twice, or the mesh has no names.
    """
    refuse_other_kind("submesh: mesh", mesh, DeviceMesh, MeshError, fix="a mesh with axis names")
    wanted = as_names(axes)
    if mesh.mesh_dim_names is None:
        raise MeshError("the mesh has no axis names; make it with mesh_dim_names=(...)")
    for axis in wanted:
        check_axis(mesh, axis)
    if not wanted or len(set(wanted)) != len(wanted):
        raise MeshError(f"axes ({', '.join(wanted)}) are empty or named twice; name each axis once")
    return mesh[tuple(name for name in mesh.mesh_dim_names if name in wanted)]


def refuse_outside(mesh: DeviceMesh, verb: str, error: type[ShardwrightError]) -> None:
    """Raise `error` on a rank that is none of the mesh's: it has no part there, and nobody to talk to."""
    if mesh.get_coordinate() is None:
        ranks = mesh.mesh.flatten().tolist()
        raise error(
            f"{verb}: rank {dist.get_rank()} is none of the ranks {ranks} of the mesh\n"
            "  fix: make the call on the ranks of the mesh alone, or pass the slice that this rank is in"
        )


def groups_above_one(mesh: DeviceMesh) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """Yield (axis name, group of this rank) for every axis of more than one rank, left to right.

    Reducing over them one after another reduces over the mesh, with the same bits on every rank.
    """
    for index, name in enumerate(axis_names(mesh)):
        if mesh.size(index) > 1:
            yield name, mesh.get_group(index)

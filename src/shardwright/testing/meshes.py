"""Meshes for functions that run in a rank pool."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.errors import MeshError, refuse_no_number
from shardwright.testing.rank_device import device_of_ranks


def sizes_of(name: str, given: Any) -> tuple[int, ...]:
    """Sizes of axes that a caller gave. Raises: MeshError: there are none, or one is no whole number."""
    sizes = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else ()
    for size in sizes or (None,):
        refuse_no_number(f"{name}={given!r:.60}: a size", size, MeshError, whole=True)
    return sizes


@functools.cache
def rank_mesh(sizes: tuple[int, ...], axes: tuple[str, ...] | None = None) -> DeviceMesh:
    """Make a CPU mesh over the first ranks of this world, once per rank process.

    A rank process serves many calls; making the same process groups in each of them would exhaust its
    sockets, and costs more than most tests.

    Args:
        sizes: the size of each axis; ranks beyond their product are not part of it.
        axes: their names, by default "axis0", "axis1", ...
    Returns: the mesh; the same object on every call with equal arguments.
    Raises: MeshError: more ranks than the world has, or another number of names.
    Cost: the first call makes one process group per axis, on all ranks together.
    """
    sizes = sizes_of("sizes", sizes)
    names = axes if axes is not None else tuple(f"axis{index}" for index in range(len(sizes)))
    if len(names) != len(sizes):
        raise MeshError(f"axes={names!r} do not name the sizes {sizes} one by one")
    if dist.is_initialized() and prod(sizes) > dist.get_world_size():
        raise MeshError(f"sizes={sizes} are {prod(sizes)} ranks, and the world has {dist.get_world_size()}")
    return init_device_mesh(device_of_ranks(), sizes, mesh_dim_names=names)

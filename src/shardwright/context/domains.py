"""Domains: named ways to factor one world of ranks into axes. Pure arithmetic: no process group here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from shardwright.context.degrees import Degrees
from shardwright.errors import MeshError, refuse_no_number

REGULAR_DOMAIN = "regular"
DENSE_DOMAIN = "dense"
EXPERT_DOMAIN = "expert"
BATCH_DOMAIN = "batch"
FLAT_DOMAIN = "flat"

DomainSpec = Callable[[Degrees], Mapping[str, int]]


def regular_axes(p: Degrees) -> dict[str, int]:
    """Return every degree as an axis of its own."""
    return {
        "pp": p.pipeline_parallel,
        "dp_replicate": p.data_parallel_replicate,
        "dp_shard": p.data_parallel_shard,
        "cp_shard": p.context_parallel_shard,
        "cp_replicate": p.context_parallel_replicate,
        "tp": p.tensor_parallel,
    }


def dense_axes(p: Degrees) -> dict[str, int]:
    """Return the axes on which the parameters of dense layers are placed."""
    return {
        "pp": p.pipeline_parallel,
        "dp_replicate": p.data_parallel_replicate,
        "dp_cp_shard": p.data_parallel_shard * p.context_parallel_shard,
        "cp_replicate": p.context_parallel_replicate,
        "tp": p.tensor_parallel,
    }


def expert_axes(p: Degrees) -> dict[str, int]:
    """Return the axes on which experts are placed: all data and context ranks, cut anew."""
    return {
        "pp": p.pipeline_parallel,
        "ep_replicate": p.data_and_context // p.expert_parallel,
        "ep_shard": p.expert_parallel,
        "tp": p.tensor_parallel,
    }


def batch_axes(p: Degrees) -> dict[str, int]:
    """Return the axes that say who reads which samples (dp) and which part of a sequence (cp)."""
    return {
        "pp": p.pipeline_parallel,
        "dp": p.data_parallel_replicate * p.data_parallel_shard,
        "cp": p.context_parallel_shard * p.context_parallel_replicate,
        "tp": p.tensor_parallel,
    }


def flat_axes(p: Degrees) -> dict[str, int]:
    """Return the whole world as one axis."""
    return {"world": p.world_size}


def as_axes(domain: str, given: Any) -> dict[str, int]:
    """Return a mapping of axes that a caller gave as a dict, or raise MeshError."""
    try:
        return dict(given)
    except (TypeError, ValueError):
        raise MeshError(f"domain {domain!r}: {given!r:.60} is no mapping of axis names to sizes") from None


def check_axes(domain: str, axes: Mapping[Any, Any], world_size: int) -> None:
    """Raise MeshError unless `axes` (name -> size, row-major over the ranks) factors the world."""
    for name, size in axes.items():
        if not isinstance(name, str) or not name:
            raise MeshError(f"domain {domain!r}: axis name {name!r} is not a text; name every axis")
        refuse_no_number(f"domain {domain!r}: the size of axis {name!r}", size, MeshError, whole=True)
    product = math.prod(axes.values())
    if not axes or product != world_size:
        listed = ", ".join(f"{name}={size}" for name, size in axes.items()) or "no axes"
        raise MeshError(
            f"domain {domain!r}: ({listed}) spans {product} ranks, but the world has {world_size}; "
            "the sizes must multiply to the world"
        )


BUILT_IN_DOMAINS: Mapping[str, DomainSpec] = MappingProxyType(
    {
        REGULAR_DOMAIN: regular_axes,
        DENSE_DOMAIN: dense_axes,
        EXPERT_DOMAIN: expert_axes,
        BATCH_DOMAIN: batch_axes,
        FLAT_DOMAIN: flat_axes,
    }
)

"""Contexts for functions that run in a rank pool: each is made once per process, with all its groups."""

from __future__ import annotations

import functools

from shardwright.context import DeviceMeshParameters


def context(**degrees):
    return _context(tuple(sorted(degrees.items())))


@functools.cache
def _context(degrees):
    return DeviceMeshParameters(**dict(degrees)).build(device="cpu")

"""What a user stated with torch's `register_sharding`: for torch's own DTensor, not asked here."""

from __future__ import annotations

import warnings

import torch

from shardwright.rules.registry import rules_of

_told: set[torch._ops.OpOverload] = set()


def warn_of(op: torch._ops.OpOverload) -> None:
    """Say once that this statement of an op does nothing here; not for a custom op with a rule."""
    if op in _told or (op.namespace != "aten" and rules_of(op)):
        return
    _told.add(op)
    warnings.warn(
        f"register_sharding({op.name()}) is for torch's own DTensor: DTensors of shardwright do not ask it\n"
        f"  fix: state the op as an equation, sw.rule({op.name()!r}, ...); the built-in rules stay in force",
        stacklevel=2,
    )

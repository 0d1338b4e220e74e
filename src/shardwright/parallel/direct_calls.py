"""A child of a sharded unit that is called while the unit's own forward does not run.

`generate()` of an encoder and decoder calls the encoder first, whose embedding belongs to the whole model:
torch gathers a unit's parameters in the unit's forward only.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwright.compat.fully_shard.units import FsdpUnit


def serve_direct_calls(unit: nn.Module, owners: Iterable[nn.Module]) -> None:
    """Let each of `owners`, the modules that hold the unit's parameters, be called on its own as well.

    Such a call is a forward of the unit: it gathers the unit's parameters, and its backward sums their
    gradients.
    Cost: inside the unit's forward none; else that of the unit's forward.
    """
    for owner in dict.fromkeys(owners):
        if owner is not unit:
            calls = _DirectCalls(FsdpUnit(unit))
            owner.register_forward_pre_hook(partial(_enter, calls), prepend=True, with_kwargs=True)
            owner.register_forward_hook(partial(_leave, calls), always_call=True)


class _DirectCalls:
    """The unit of one child, and how many direct calls of the child are under way."""

    def __init__(self, unit: FsdpUnit) -> None:
        self.unit = unit
        self.under_way = 0


def _enter(
    calls: _DirectCalls, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if torch.compiler.is_compiling():
        return None
    phase = calls.unit.phase
    if phase == "PRE_BACKWARD":  # a checkpoint of a direct call; the backward of another one ran
        calls.unit.gather_again()
    if phase != "IDLE":
        return None
    calls.under_way += 1
    return calls.unit.enter(args, kwargs)


def _leave(calls: _DirectCalls, _: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
    if not calls.under_way:
        return out
    calls.under_way -= 1
    return calls.unit.leave(args, out)

"""An optimizer that was made before a strategy updates tensors that no module has; its first step says so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from shardwright.errors import ParallelError
from shardwright.tensor.modules.ties import names_of_replaced

# Parameters that a strategy took from a module of this rank for good -> their names.
_taken = WeakTensorKeyDictionary()


def taken_away(parameter: Tensor, name: str) -> None:
    """Note that no module of this rank has the parameter any more: another rank holds it."""
    _taken[parameter] = name


def refuse_replaced(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """What every optimizer does first: torch calls it before each `step()`.

    A replaced parameter that has a gradient is in use somewhere (a part that shares it was never placed), and
    is let through.
    Raises: ParallelError: parameters of the optimizer were replaced, or are on other ranks.
    Cost: a look-up for each parameter, where a replaced one is still alive; else nothing.
    """
    if torch.compiler.is_compiling():
        return
    replaced = names_of_replaced()
    if not replaced and not _taken:
        return
    held = [
        p for group in optimizer.param_groups for p in group["params"] if p.grad is None and p.requires_grad
    ]
    names = [replaced.get(id(p)) or _taken.get(p) for p in held]
    found = [name for name in names if name is not None]
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ParallelError(
            f"{type(optimizer).__name__}.step(): {', '.join(found[:3])}{more} were placed, or given to other "
            "ranks, after this optimizer was made: it would update tensors that no module computes with\n"
            "  fix: make the optimizer after the last strategy, of model.parameters()"
        )

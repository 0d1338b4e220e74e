"""Several modules that are one unit of `fully_shard`: gathered together, and summed together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from shardwright.compat import RELEASE
from shardwright.compat.fully_shard.units import FsdpUnit
from shardwright.errors import ParallelError
from shardwright.parallel.pipeline.mark import is_elsewhere

Modules = TypeVar("Modules", bound=nn.Module | Sequence[nn.Module])


class SeveralModules(nn.ModuleList):
    """The tree that one unit of several modules is, for as long as it is placed."""


def one_unit(module: Any) -> Any:
    """A list of modules as one tree, without those that stand inside of others; anything else as it is.

    Modules that other stages of a pipeline hold are left out: there is nothing of them to be gathered here.

    Raises: ParallelError: on torch before 2.13, which loses track of those that are called on their own.
    """
    if isinstance(module, nn.Module) and is_elsewhere(module):
        return SeveralModules()
    given = list(dict.fromkeys(module)) if isinstance(module, list | tuple) else []
    if not given or not all(isinstance(each, nn.Module) for each in given):
        return module
    if RELEASE < (2, 13) and len(given) > 1:
        raise ParallelError(
            "parallelize_fsdp: a unit of several modules needs torch 2.13\n  fix: one call for each of them"
        )
    inside = {part for each in given for part in each.modules() if part is not each}
    return SeveralModules(each for each in given if each not in inside and not is_elsewhere(each))


def members(unit: nn.Module) -> list[nn.Module]:
    """The modules whose forwards are those of a unit."""
    return list(unit) if isinstance(unit, SeveralModules) else [unit]


def follow_several(parts: Sequence[nn.Module]) -> None:
    """Hear, before torch begins and after it ends, when forwards of the modules of one unit begin and end."""
    if len(parts) == 1:
        return
    FsdpUnit(parts[0]).stay_open_on_error()
    for part in parts:
        part.register_forward_pre_hook(_refuse_without_root, prepend=True)
        part.register_forward_hook(_end_alone)


def _refuse_without_root(module: nn.Module, _args: Any) -> None:
    """Raise ParallelError where no unit is around those of a unit of several modules: none of them begins."""
    if not FsdpUnit(module).has_root:
        raise ParallelError(
            f"parallelize_fsdp: {type(module).__name__} is in a unit of several modules, and none is around "
            "it\n  fix: shard the module that holds them too, after them"
        )


def _end_alone(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
    """End the forward of a unit of several modules with the one that has run, where no other's is around.

    torch waits for all of them, and where the rest never come keeps their parameters whole, and the next
    forward of the model without its end.
    """
    unit = FsdpUnit(module)
    return out if torch.compiler.is_compiling() or not unit.runs_alone else unit.leave(args, out)

"""How a module says that it was cut into stages."""

from __future__ import annotations

from typing import TypeGuard

from torch import nn

from shardwright.errors import ParallelError

ATTRIBUTE = "pipeline_stages"


class StandIn(nn.Module):
    """What stands where another rank of a pipeline holds a part; it has no parameters."""

    @property
    def shell(self) -> nn.Module:
        """The part, without its weights."""
        raise NotImplementedError  # `forward.conductor.Elsewhere` has it, above this file


def is_elsewhere(module: nn.Module) -> TypeGuard[StandIn]:
    """Is it a part that another rank holds? A strategy for each layer of a model has nothing to do there."""
    return isinstance(module, StandIn)


def is_cut(module: nn.Module) -> bool:
    """Has `parallelize_pipeline` cut it? What a strategy is about may then all be on other ranks."""
    return ATTRIBUTE in module.__dict__ or any(map(is_elsewhere, module.modules()))


def refuse_cut(module: nn.Module, verb: str) -> None:
    """Raise ParallelError for a module that `parallelize_pipeline` has cut.

    A plan names modules of the whole model, and each rank would find other ones missing.
    """
    if is_cut(module):
        raise ParallelError(
            f"{verb}: {type(module).__name__} is cut into stages already, and a rank has a part of what the "
            "plan names; apply it before parallelize_pipeline"
        )

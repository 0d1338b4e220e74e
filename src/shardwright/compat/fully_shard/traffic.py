"""When torch's `fully_shard` gathers and scatters, and how where nobody says otherwise."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather as DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter as DefaultReduceScatter

from shardwright.compat.fully_shard.parameters import groups_of


def hold_gradients_back(module: nn.Module) -> None:
    """Until `reduce_gradients`, backwards of the sharded units inside only add up, and send no gradient."""
    for root in _roots(module):
        root.set_is_last_backward(False)
        root.set_reshard_after_backward(False)
        root.set_requires_gradient_sync(False)


def reduce_gradients(module: nn.Module) -> None:
    """Reduce what backwards have added up, and cut the parameters again.

    Source: what torch's pipeline stages do after the last backward, for the module of a stage only.
    """
    for root in _roots(module):
        root.set_is_last_backward(True)
        root.set_reshard_after_backward(True)
        root.set_requires_gradient_sync(True)
        state = root._get_fsdp_state()
        for each in state._state_ctx.all_states:
            for group in groups_of(each):
                group.post_backward()
        shared: Any = state._state_ctx
        if getattr(shared, "manual_backward_finalization_active", False) is None:  # from torch 2.15 on
            shared.manual_backward_finalization_active = False
        state._root_post_backward_final_callback()


def forget_forwards(module: nn.Module) -> None:
    """No backward comes of the forwards since the last one: nothing stays gathered for it, or is fetched."""
    for root in _roots(module):
        state = root._get_fsdp_state()
        state._comm_ctx.post_forward_order.clear()
        for each in state._state_ctx.all_states:
            for group in groups_of(each):
                group._post_forward_indices.clear()
                group.reshard()


def _roots(module: nn.Module) -> list[FSDPModule]:
    units = [m for m in module.modules() if isinstance(m, FSDPModule)]
    inside = {id(m) for unit in units for m in unit.modules() if m is not unit}
    return [unit for unit in units if id(unit) not in inside and unit._get_fsdp_state()._is_root is not None]

"""The units of torch's `fully_shard`: the private names that what happens around their forwards needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import _composable_state

from shardwright.compat.fully_shard.parameters import fsdp_parameters, groups_of


@dataclass(frozen=True, slots=True)
class FsdpUnit:
    """What torch does around the forward of a sharded unit."""

    module: nn.Module

    @property
    def phase(self) -> str:
        """What it does, as torch calls it: IDLE is neither its forward nor its backward."""
        name: str = self._state._training_state.name
        return name

    @property
    def is_idle(self) -> bool:
        """Neither in its forward nor in its backward."""
        return self.phase == "IDLE"

    @property
    def has_root(self) -> bool:
        """A unit is around it, or it is one module."""
        return len(self._state._modules) == 1 or getattr(self._state, "around", None) is not None

    def goes_on(self, begun: Iterable[nn.Module]) -> bool:
        """It is in a forward of a unit of several modules that one of `begun` has begun."""
        if self.is_idle or len(self._state._modules) == 1:
            return False
        return any(FsdpUnit(each)._state is self._state for each in begun)

    def stay_open_on_error(self) -> None:
        """Let a module that raises leave its unit of several in its forward, as one does that is a unit.

        torch ends the unit then, and no backward of it would come.
        """
        for handle in self._state._post_forward_hook_handle.handles:
            for part in self._state._modules:
                part._forward_hooks_always_called.pop(handle.id, None)

    @property
    def runs_alone(self) -> bool:
        """In its forward, which no other unit's is around."""
        alone: bool = not self.is_idle and self._state._state_ctx.iter_forward_root is self._state
        return alone

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather the parameters, before a forward with these arguments; they may be cast."""
        begin_at_the_root(self.module)
        entered: tuple[tuple[Any, ...], dict[str, Any]] = self._state._pre_forward(self.module, args, kwargs)
        return entered

    def gather_again(self) -> None:
        """In its backward: gather what that may have freed, for what is computed again in it."""
        for group in groups_of(self._state):
            group.unshard()
            group.wait_for_unshard()

    def leave(self, args: tuple[Any, ...], out: Any) -> Any:
        """Free what `enter` gathered; a backward of `out` gathers it again."""
        self._state._modules_to_run_forward.clear()  # of a unit of several modules
        return self._state._post_forward(self.module, args, out)

    def gathered(self) -> list[torch.Tensor]:
        """Its parameters, as a forward sees them between `enter` and `leave`."""
        held = [each.owner._parameters[each.name] for each in fsdp_parameters(self.module)]
        return [each for each in held if each is not None]

    @property
    def _state(self) -> Any:
        return self.module._get_fsdp_state()  # type: ignore[operator]


def is_around(unit: nn.Module, inner: nn.Module) -> None:
    """Note that a unit holds another one."""
    inner._get_fsdp_state().around = unit._get_fsdp_state()  # type: ignore[operator]


def begin_at_the_root(unit: nn.Module) -> None:
    """Before a unit's first forward: torch takes the first unit that runs for the root of all inside of it.

    Of a model of which a part is called first (`model.encode(x)`), it would refuse the whole afterwards.
    """
    root = state = unit._get_fsdp_state()  # type: ignore[operator]
    while getattr(root, "around", None) is not None:
        root = root.around
    if state._is_root is None:
        _begin(root)
    elif state._state_ctx.post_backward_final_callback_queued and torch._C._current_graph_task_id() == -1:
        _forget_a_backward_that_raised(state)


def _forget_a_backward_that_raised(state: Any) -> None:
    """torch ends a backward in a callback that an error drops, and would end no later one.

    What it left under way is lost, as the step is; gradients that are in their places stay there.
    """
    states = state._state_ctx.all_states
    managed = [each for one in states for group in groups_of(one) for each in group.fsdp_params]
    for each in managed:
        if not isinstance(getattr(type(each), "unsharded_accumulated_grad", None), property):  # torch 2.15
            each.unsharded_accumulated_grad = None
        if hasattr(each, "_unsharded_param"):  # it was gathered once
            each._unsharded_param.grad = None
    kept = [(each.sharded_param, each.sharded_param.grad) for each in managed]
    next(one for one in states if one._is_root)._root_post_backward_final_callback()
    for parameter, gradient in kept:
        parameter.grad = gradient


def _begin(root: Any) -> None:
    """Start a root and all inside of it, or none: torch marks them before it looks at their parameters."""
    inside = [m._get_fsdp_state() for m in root._modules[0].modules() if hasattr(m, "_get_fsdp_state")]
    before = [state._is_root for state in inside]
    try:
        root._lazy_init()
    except BaseException:
        for state, was in zip(inside, before, strict=True):
            state._is_root = was
        root._state_ctx.all_states.clear()
        raise


def replaced_parameters(module: nn.Module) -> list[str]:
    """The parameters of a `fully_shard` unit whose place is empty, or has tensors that it would pass over.

    Once it has started, any others; before, it takes over parameters (`load_state_dict(assign=True)`).
    """
    started = module._get_fsdp_state()._is_root is not None  # type: ignore[operator]
    found = []
    for managed in fsdp_parameters(module):
        held, inner = managed.owner._parameters.get(managed.name), managed.inner
        between = getattr(inner, "_sharded_post_forward_param", None)  # `reshard_after_forward=2`
        own = (inner.sharded_param, getattr(inner, "_unsharded_param", None), between)
        passed_over = held is None or all(held is not each for each in own)
        if (passed_over and (started or not isinstance(held, nn.Parameter))) or not managed.follow_swapped():
            found.append(str(inner._param_fqn or managed.name))
    return found


def forget_unit(module: nn.Module) -> None:
    """A module that is put back as it was before `fully_shard` may be given to it again."""
    if not hasattr(module, "_get_fsdp_state"):  # it is no unit, and torch marks one before it is
        _composable_state._module_state_mapping.pop(module, None)

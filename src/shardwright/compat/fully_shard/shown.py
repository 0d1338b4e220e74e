"""What the modules of torch's `fully_shard` units show between forwards and backwards: what is sharded.

Some units keep their parameters whole from a forward to its backward (the root; others by
`reshard_after_forward`), and torch leaves the copies in the places of the parameters: `zero_grad`, a norm, a
clamp or an optimizer that is made there would reach what is forgotten. Here memory is kept and the sharded
parameters are shown; the backward computes with what the graph has. Methods are set on the group of one unit,
not on torch's class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.utils import _apply_to_tensors

from shardwright.compat import is_functorch_wrapped_tensor, tree_leaves
from shardwright.compat.fully_shard.parameters import groups_of
from shardwright.compat.fully_shard.views import tensors_of


def show_sharded_between(
    module: nn.Module,
    refuse_lost: Callable[[nn.Module, str], None],
    refuse_hidden: Callable[[nn.Module, object], None],
) -> None:
    """Show the unit's sharded parameters where neither its forward nor its backward runs.

    Args: refuse_lost: raises, given the unit and the name of a parameter of which the whole was written: it
        is asked before the memory is given back. refuse_hidden: raises, given the unit and a result in which
        torch finds nothing.
    Cost: a forward that finds what an earlier one has kept gathers again where the sharded parameter was
        written since.
    """
    for group in groups_of(module._get_fsdp_state()):  # type: ignore[operator]
        _Shown(module, group, refuse_lost, refuse_hidden).take_over()


class _Shown:
    """The methods of one group that decide what its modules show."""

    def __init__(
        self,
        unit: nn.Module,
        group: Any,
        refuse_lost: Callable[[nn.Module, str], None],
        refuse_hidden: Callable[[nn.Module, object], None],
    ) -> None:
        self._unit, self._group = unit, group
        self._refuse_lost, self._refuse_hidden = refuse_lost, refuse_hidden
        self._gathered_of: list[_State] = []
        self._gathered_as: list[_State] = []

    def take_over(self) -> None:
        group = self._group
        self._unshard, self._to_unsharded = group.unshard, group._to_unsharded
        self._post_forward, self._post_backward = group.post_forward, group.post_backward
        group.unshard, group._to_unsharded = self.unshard, self.to_unsharded
        group.post_forward, group.post_backward = self.post_forward, self.post_backward

    def unshard(self, async_op: bool = False) -> None:
        group = self._group
        # A backward computes with what its forward had; a forward with what is there now.
        forward = group._training_state.name != "PRE_BACKWARD"
        if forward and not group.is_sharded and self._gathered_of != self._sharded():
            for each in group.fsdp_params:
                torch.autograd.graph.increment_version(each._unsharded_param)  # as a step on one device does
            group._to_sharded()
        if group.is_unsharded:
            self._show(whole=True)
        self._unshard(async_op)

    def to_unsharded(self) -> None:
        self._to_unsharded()
        self._gathered_of, self._gathered_as = self._sharded(), self._whole()

    def post_forward(self, module: Any, args: Any, out: Any) -> Any:
        self._refuse_written()
        self._refuse_hidden_results(out)
        out = self._post_forward(module, args, self._with_memory_of_its_own(out))
        self._show(whole=False)
        return out

    def post_backward(self, *unused: Any) -> None:
        self._post_backward(*unused)
        self._show(whole=False)

    def _show(self, *, whole: bool) -> None:
        for each in self._group.fsdp_params:
            shown, info = each._unsharded_param if whole else each.sharded_param, each._module_info
            if shown.requires_grad != each.sharded_param.requires_grad:  # frozen or thawed since it came
                shown.requires_grad_(each.sharded_param.requires_grad)
            if info.module._parameters[info.param_name] is not shown:
                each._setattr_on_modules(shown)

    def _sharded(self) -> list[_State]:
        return [_state_of(p.sharded_param, p.handed_out) for p in self._group.fsdp_params]

    def _whole(self) -> list[_State]:
        return [_state_of(p._unsharded_param) for p in self._group.fsdp_params]

    def _refuse_written(self) -> None:
        """What is written into whole parameters, or given to them as memory, goes with them.

        Not seen: what is written through `parameter.data`. Recurrent layers move their weights on CUDA.
        """
        before, self._gathered_as = self._gathered_as, self._whole()
        if before == self._gathered_as:
            return
        for each, was, now in zip(self._group.fsdp_params, before, self._gathered_as, strict=True):
            if was != now and not isinstance(each._module_info.module, nn.RNNBase):
                self._refuse_lost(self._unit, str(each._module_info.param_name))

    def _with_memory_of_its_own(self, out: Any) -> Any:
        """A parameter that a forward returns, or a view of one, as a copy: its memory is given back."""
        gathered = {state[0] for state in self._whole()}

        def is_gathered(x: torch.Tensor) -> bool:  # where it has memory that can be seen
            strided = x.layout is torch.strided and not is_functorch_wrapped_tensor(x)
            return strided and _state_of(x)[0] in gathered

        if not any(map(is_gathered, tensors_of(out))):
            return out
        return _apply_to_tensors(lambda x: x.clone() if is_gathered(x) else x, out)

    def _refuse_hidden_results(self, out: Any) -> None:
        """Where torch finds no result with a graph, the backward never gathers, and no gradient is kept."""
        if not torch.is_grad_enabled():
            return
        hidden = next((x for x in tree_leaves(out) if not isinstance(x, _SEEN)), None)
        if hidden is None or any(x.requires_grad for x in tensors_of(out)):
            return
        if any(p.sharded_param.requires_grad for p in self._group.fsdp_params):
            self._refuse_hidden(self._unit, hidden)


_State = tuple[int, int, int, int]
# What a forward may return beside tensors without hiding any.
_SEEN = (torch.Tensor, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def _state_of(x: torch.Tensor, handed_out: int = 0) -> _State:
    """Its memory on this rank, and how often that was written: as a whole, here alone, through `x.data`."""
    local = getattr(x, "_local_tensor", x)
    return local.untyped_storage()._cdata, _version(x), _version(local), handed_out


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version

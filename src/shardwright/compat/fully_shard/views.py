"""The backward of a sharded unit begins where it should: at views that are written later, at what is left.

torch hangs the hook that gathers for the backward on what a unit returns. A write into a view (`x += y` after
a linear layer of three dims) makes autograd forget that, and what a forward leaves in an attribute (a loss of
its own) may be reached first, or alone: the backward met memory that was given back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.utils import _apply_to_tensors

from shardwright.compat import current_graph_task_id, tree_leaves
from shardwright.compat.fully_shard.parameters import groups_of


def begin_before_bases(module: nn.Module, refuse_graph: Callable[[nn.Module], None]) -> None:
    """Let the backward of a unit begin before that of tensors of which it returns views, or that it leaves.

    refuse_graph: raises; called where a backward is recorded for a second one, which would read memory that
        was given back, and whose gradients nobody would sum.
    """
    _Beginning(module._get_fsdp_state(), refuse_graph).take_over()  # type: ignore[operator]


class _Beginning:
    """Hooks of one unit; `_first`: the number of the first node of autograd that its forward can make."""

    def __init__(self, state: Any, refuse_graph: Callable[[nn.Module], None]) -> None:
        self._state, self._refuse_graph = state, refuse_graph
        self._first: int | None = None

    def take_over(self) -> None:
        state = self._state
        self._hook, state._register_pre_backward_hook = state._register_pre_backward_hook, self.hook
        for group in groups_of(state)[:1]:  # without parameters there is nothing to begin
            self._pre_forward, group.pre_forward = group.pre_forward, self.pre_forward
            self._post_backward, group.post_backward = group.post_backward, partial(self.post_backward, group)

    def pre_forward(self, module: Any, args: Any, kwargs: Any) -> Any:
        if self._first is None and torch.is_grad_enabled():
            self._first = _number(torch.empty(0, requires_grad=True).neg().grad_fn)
        return self._pre_forward(module, args, kwargs)

    def post_backward(self, group: Any, *unused: Any) -> None:
        if current_graph_task_id() != -1 and torch.is_grad_enabled():  # by `create_graph`
            trained = any(each.sharded_param.requires_grad for each in group.fsdp_params)
            if group.reshard_after_backward or trained:
                self._refuse_graph(self._state._modules[0])
        self._post_backward(*unused)

    def hook(self, out: Any) -> Any:
        first, self._first = self._first, None
        if first is not None and torch.is_grad_enabled():
            for x in self._left(first):
                x.register_hook(self._begin)
        views = [x for x in tensors_of(out) if x.requires_grad and x._is_view()]
        if not views or not torch.is_grad_enabled():
            return self._hook(out)
        for node in {id(x._base): x._base.grad_fn for x in views if x._base is not None}.values():
            if node is not None and first is not None and _number(node) >= first:  # of its own work
                node.register_prehook(self._begin)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # of what is mended
            return self._hook(out)

    def _left(self, first: int) -> list[torch.Tensor]:
        """What this forward has computed and left in attributes of modules that no other unit holds."""
        found = _left_in(self._state._modules)
        return [x for x in found if x.grad_fn is not None and _number(x.grad_fn) >= first]

    def _begin(self, _gradients: Any) -> None:
        self._state._pre_backward(None)


_OF_MODULES = frozenset(vars(nn.Module()))


def _left_in(modules: Iterable[nn.Module | None]) -> list[torch.Tensor]:
    """Tensors that are attributes, or in lists, tuples and dicts that are. It runs after each forward."""
    found: list[torch.Tensor] = []
    below: list[Any] = []
    for module in modules:
        for name, value in vars(module).items() if module is not None else ():
            if name not in _OF_MODULES and type(value) not in _HOLD_NONE:
                inside = tree_leaves(value) if isinstance(value, list | tuple | dict) else (value,)
                found += [x for x in inside if isinstance(x, torch.Tensor)]
        below += module._modules.values() if module is not None else ()
    return found + _left_in([m for m in below if not isinstance(m, FSDPModule)]) if below else found


_HOLD_NONE = frozenset({bool, int, float, str, type(None)})  # what most attributes are


def _number(node: Any) -> int:
    return int(node._sequence_nr())


def tensors_of(out: Any) -> list[torch.Tensor]:
    """The tensors that torch finds in what a unit's forward returns: in dataclasses too."""
    found: list[torch.Tensor] = []
    for each in tree_leaves(out):
        found += [each] if isinstance(each, torch.Tensor) else _found_by_torch(each)
    return found


def _found_by_torch(leaf: object) -> list[torch.Tensor]:
    """torch's function is a cycle of references that knows its `keep`: nothing may stay there."""
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x

    _apply_to_tensors(keep, leaf)
    found = list(kept)
    kept.clear()
    return found

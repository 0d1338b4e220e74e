"""The model's own code, above its parts: followed while it runs for a stage."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from shardwright.compat import tree_leaves, tree_map
from shardwright.parallel.pipeline.forward.hollow import (
    hollow_if_distributed,
    is_hollow,
    made_of_more,
    origins,
)

if TYPE_CHECKING:
    from types import FrameType

    from shardwright.parallel.pipeline.forward.run import Run


# Of hollow tensors nobody knows.
_ASKS_FOR_A_GRAPH = frozenset(
    getattr(torch.Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf", "grad")
)
_HOOKS = frozenset({Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad})
_BACKWARDS = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})
# Functions of torch that are written in Python call the mode from here.
_BETWEEN = frozenset(
    f"torch.{name}"
    for name in ("overrides", "nn.functional", "functional", "_tensor", "_jit_internal", "autograd")
)


class OwnCode(TorchFunctionMode):
    """Sees each function of the model's own code, none of its parts.

    It writes the journal, gives each function its seed, and follows hollow tensors: what is made of them, and
    what cannot be made of them.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, run = kwargs or {}, self.run
        if run.inside or run.ended:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", type(func).__name__)
        leaves = tree_leaves((args, kwargs))
        values = frozenset().union(*map(origins, leaves))
        of_the_model = _is_of_the_model(sys._getframe(1))
        if of_the_model and name != "__get__":
            run.streams.begin(run.journal.count)
            run.journal.note(name, leaves)
        if of_the_model:
            self._refuse_what_ends_at_a_border(func, leaves)
        if not values:
            return func(*args, **kwargs)
        if func in _HOOKS:  # on a gradient that does not come by here
            return RemovableHandle(OrderedDict())
        if of_the_model and func in _ASKS_FOR_A_GRAPH:
            run.need(values)
        if _writes(name, args, kwargs):
            run.need(values)
        args, kwargs = tree_map(partial(hollow_if_distributed, run.mode), (args, kwargs))
        try:
            out = func(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  what it was does not matter: there are no values
            run.need(values, error)
        for x in tree_leaves(out):
            made_of_more(x, values)
        return out

    def _refuse_what_ends_at_a_border(self, func: Any, leaves: list[Any]) -> None:
        if func in _BACKWARDS:
            self.run.refuse(
                "the model's own code asks for gradients inside of its forward, and a graph ends where a "
                "stage ends\n  fix: do it in a layer that one stage holds"
            )
        if any(isinstance(x, torch.Generator) for x in leaves):
            self.run.refuse(
                "the model's own code draws from a generator of its own, and each stage would take other "
                "numbers from its copy\n  fix: draw in a layer that one stage holds, or from torch's own"
            )


def _is_of_the_model(caller: FrameType) -> bool:
    """Is the function called by the model, not by the hooks and caches of strategies in it?"""
    frame: FrameType | None = caller
    where: str = caller.f_globals.get("__name__", "")
    while frame is not None and where in _BETWEEN:
        frame = frame.f_back
        where = "" if frame is None else frame.f_globals.get("__name__", "")
    return where.startswith("torch.nn.modules.") or not where.startswith(("torch.", "shardwright."))


def _writes(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Would it write into a tensor that has values, which a hollow one leaves as they are?"""
    if isinstance(kwargs.get("out"), Tensor) and not is_hollow(kwargs["out"]):
        return True
    in_place = name == "__setitem__" or name.startswith("__i") or (name[-1] == "_" and name[-2:] != "__")
    return in_place and bool(args) and isinstance(args[0], Tensor) and not is_hollow(args[0])

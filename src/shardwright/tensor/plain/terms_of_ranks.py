"""The refusal of a rank's own term where it would weigh a DTensor's gradient as if all ranks had the same.

A plain tensor of one element counts as replicated. One whose graph reads parameters that each rank computes
with for itself (a loss over this rank's rows) is not: ranks have other values. Added to a DTensor it takes
nothing from that one's gradient; multiplied, the gradient is its value, another one on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import axis_names, function_of
from shardwright.compat.fully_shard import sharded_behind
from shardwright.errors import RuleError
from shardwright.rules.call import Args
from shardwright.tensor.autograd import Localize
from shardwright.tensor.plain.refuse import tensors_in

# Functions in which the gradient of one operand does not depend on the value of another.
_ADDING = frozenset(
    {"add", "add_", "__radd__", "__iadd__", "sub", "sub_", "__rsub__", "__isub__", "stack", "cat", "where"}
)


def refuse_terms(func: Any, args: Args, kwargs: dict[str, Any]) -> None:
    """Raise RuleError for a rank's own term among the operands, unless it is only added.

    Cost: a walk through the graph of a plain tensor of one element that wants a gradient; nothing else.
    """
    name = getattr(func, "__name__", "")
    given = list(tensors_in((*args, *kwargs.values())))
    meshes = [x.device_mesh for x in given if isinstance(x, TorchDTensor) and x.requires_grad]
    if not meshes or name in _ADDING:
        return
    for x in given:
        if x.requires_grad and not isinstance(x, TorchDTensor):
            axes = _own_axes(x, meshes)
            if axes:
                raise RuleError(_TERM.format(name, ", ".join(axes)))


_TERM = (
    "{0}: a plain tensor of one element beside a DTensor that wants a gradient, made of parameters that each "
    "rank computes with for itself over {1}: this rank's own term, by which the gradient would be another "
    "one on each rank\n"
    "  fix: shardwright.grads.global_mean(term, 1, mesh), which is the same on all of them; or weigh it in "
    "the forward of the module that owns the parameter"
)


def _own_axes(term: torch.Tensor, meshes: list[DeviceMesh]) -> list[str]:
    """The axes of one of the meshes on which the ranks' terms are made of their own rows."""
    named = {axis for mesh in meshes for axis in axis_names(mesh)}
    for axes in _leaves(term):
        shared = [axis for axis in axes if axis in named]
        if shared:
            return shared
    return []


def _leaves(term: torch.Tensor) -> Iterator[tuple[str, ...]]:
    """Of each parameter that a graph reads: the axes whose ranks compute with it for themselves."""
    seen: set[Any] = set()
    left: list[Any] = [term.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen or _is_same_everywhere(node):
            continue
        seen.add(node)
        if function_of(node) is Localize:
            use = node.spec.use
            yield () if use is None else tuple(use.axes)
        variable = getattr(node, "variable", None)
        sharded: Any = None if variable is None else sharded_behind(variable)
        if sharded is not None:
            yield (sharded._fully_sharded,)
        left += [following for following, _ in node.next_functions]


def _is_same_everywhere(node: Any) -> bool:
    """Is what it gives the same on all ranks, by a reduction over them?"""
    if getattr(function_of(node), "same_on_all_ranks", False):
        return True
    return any(name in node.name() for name in ("AllReduce", "all_reduce"))  # torch's, of three packages

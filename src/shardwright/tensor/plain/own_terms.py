"""Gradients that a `torch.autograd.Function` gives for a parameter that computes as its local tensor.

A function of torch is asked by such a parameter, and its gradient comes back with a layout (`Localize`).
`Function.apply` asks nobody: what it gives is this rank's term, as the local tensor that it computed with. In
a sum with another gradient of the parameter it would count as a value that is the same on every rank.

Rejected: another `Function.apply` (changes programs that do not use us); hooks on leaves (run after the sum).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import current_autograd_node, current_graph_task_id
from shardwright.errors import RuleError
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.local_use import kept_spec, restored
from shardwright.tensor.wrap import wrap

Call = Callable[[Op, tuple[Any, ...], Mapping[str, Any]], Any]

_SUM, _IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
SUMS = frozenset({_SUM, _IN_PLACE})  # the ops by which autograd adds gradients


def labelled(route: Call, func: Op, args: Args, kwargs: Kwargs) -> Any:
    """The sum; of gradients of one parameter those without its layout get it first.

    Raises: RuleError: the parameter's gradient was summed over the ranks already.
    """
    if current_graph_task_id() != -1 and len(args) == 2 and not on_one_mesh(*args):
        args = _labelled(func, *args)
    return route(func, args, kwargs)


def term_of(parameter: DTensor, gradient: torch.Tensor) -> DTensor | None:
    """The gradient as that of a parameter with a local use, if it is one of what that computes as."""
    spec, inner = parameter._spec, kept_spec(parameter._spec)
    if inner is None:
        fits = not isinstance(gradient, TorchDTensor) and gradient.shape == parameter._local_tensor.shape
    else:
        fits = isinstance(gradient, TorchDTensor) and gradient._spec.mesh == inner.mesh
        fits = fits and gradient.shape == inner.layout.shape
    return wrap(*restored(spec, gradient)) if fits else None


def on_one_mesh(one: Any, other: Any) -> bool:
    """Is there no tensor of the two that the other's mesh does not have?"""
    if isinstance(one, TorchDTensor) and isinstance(other, TorchDTensor):
        return one._spec.mesh is other._spec.mesh
    return not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor)


def _labelled(func: Op, one: torch.Tensor, other: torch.Tensor) -> tuple[Any, ...]:
    for leaf in _leaves():
        if isinstance(one, TorchDTensor) and one._spec.mesh == leaf._spec.mesh:
            term = term_of(leaf, other)
            if term is not None:
                if func is _IN_PLACE and one.placements != term.placements:
                    raise RuleError(_SUMMED.format(tuple(leaf.shape)))
                return one, term
        elif isinstance(other, TorchDTensor) and other._spec.mesh == leaf._spec.mesh and func is _SUM:
            term = term_of(leaf, one)
            if term is not None:
                return term, other
    return one, other


_SUMMED = (
    "backward: a torch.autograd.Function gave a gradient for a parameter of shape {}, which computes as its "
    "local tensor and whose gradient was summed over the ranks already\n"
    "  fix: give the function `parameter.type_as(x)`, x an activation of its dtype (what the parameter "
    "computes as; on one device the parameter itself), or sum once, after the last backward"
)


def _leaves() -> Iterator[DTensor]:
    """The parameters whose gradients the running node gives, or adds to."""
    node: Any = current_autograd_node()
    if node is None:
        return
    for following in (node, *(edge for edge, _ in node.next_functions)):
        leaf = getattr(following, "variable", None)
        if isinstance(leaf, TorchDTensor) and getattr(leaf._spec, "use", None) is not None:
            yield leaf  # type: ignore[misc]

"""Functions of several ops that are one node of the graph of gradients, where all that they do is local.

`F.linear` of three dims is four ops, and seven more backward. Each is a way through torch's dispatcher to
our class and back: a few microseconds where caches are warm, several times that behind a product that has
filled them, which is where models call it. As one node it is one local call forward. Backward each gradient
is a function of tensors, known as a whole or run op by op, with the moves and layouts of its ops: what a node
decides is how many ways there are, never a layout.

`whole_functions` learns which calls are such: those whose ops are, where no gradient is asked for, the
function on the local tensors. Elsewhere the graph is torch's own, and where somebody looks at the ops or at
what is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from shardwright.compat import nn_functions, will_run
from shardwright.layout.layout import all_hold_some
from shardwright.remember import memo
from shardwright.rules.call import Args
from shardwright.tensor.autograd import one_by_one
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.spec import Spec
from shardwright.tensor.wrap import wrap

# Calls by their keys: what runs them as a node; False: torch's own graph. Bounded by who fills it.
calls: dict[tuple[Any, ...], Callable[..., Any] | bool] = memo("calls that are one node", {})


class Node(NamedTuple):
    """A function that may be a node.

    function: of autograd; it is given the spec of the result, and what the function is given.
    fits:     may a call on these arguments be one, as far as their layouts say?
    """

    function: type[torch.autograd.Function]
    fits: Callable[..., bool]


def is_wanted(func: Any, args: Args) -> bool:
    """Is it a call of such a function that records a gradient?"""
    records = func in NODES and torch.is_grad_enabled()
    return records and any(isinstance(x, DTensor) and x.requires_grad for x in args)


def node_of(func: Any, args: Args, spec: Spec) -> Callable[..., Any] | bool:
    """What runs the calls of this key as one node; False: they may not be one.

    Args: spec: of the result. The same on all ranks: nothing but layouts is asked.
    """
    node = NODES[func]
    layouts = [x._spec.layout for x in args if isinstance(x, DTensor)]
    if not node.fits(*args) or not all(map(all_hold_some, (spec.layout, *layouts))):
        return False
    # past `Function.apply` in Python, as `tensor.autograd.apply`: no transform is on, and nothing is compiled
    return partial(super(torch.autograd.Function, node.function).apply, spec)  # type: ignore[misc]


class Linear(torch.autograd.Function):
    """`F.linear` on local tensors. Backward: the products in the order of torch's own graph."""

    @staticmethod
    def forward(ctx: Any, spec: Spec, x: DTensor, weight: DTensor, bias: DTensor | None = None) -> DTensor:
        """Save what the gradients that are wanted are made of."""
        ctx.set_materialize_grads(False)
        wanted = ctx.needs_input_grad
        ctx.save_for_backward(x if wanted[2] else None, weight if wanted[1] else None)
        ctx.order = (1, 0) if bias is None else (0, 1, 2)
        local = None if bias is None else bias._local_tensor
        return wrap(nn_functions.linear(x._local_tensor, weight._local_tensor, local), spec)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the operands that the running backward wants."""
        found: list[torch.Tensor | None] = [None, None, None]
        x, weight = ctx.saved_tensors
        for place in ctx.order if grad is not None else ():
            if ctx.needs_input_grad[1 + place] and will_run(ctx, place):
                given = (grad, (weight, x, None)[place])
                found[place] = DTensor.__torch_function__(_GRADIENTS[place], (DTensor,), given)
        return None, *found


def _of_input(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if grad.dim() == 2:
        return grad.mm(weight)
    return grad.flatten(0, -2).mm(weight).view(*grad.shape[:-1], weight.shape[1])


def _of_weight(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return grad.flatten(0, -2).t().mm(x.flatten(0, -2))


def _of_bias(grad: torch.Tensor, _: None) -> torch.Tensor:
    return grad.sum(tuple(range(grad.dim() - 1)))


# By the place of the operand.
_GRADIENTS: tuple[Callable[..., torch.Tensor], ...] = _of_input, _of_weight, _of_bias
# Functions of our own that may be whole, as torch's are.
WHOLE = frozenset(_GRADIENTS)


def _fits_linear(x: Any, weight: Any, bias: Any = None) -> bool:
    """Rows on a matrix, as they are: finished, of real numbers, row by row in memory."""
    given = [x, weight] if bias is None else [x, weight, bias]
    are_simple = all(type(each) is DTensor and _is_simple(each) for each in given)
    return are_simple and x.dim() >= 2 and weight.dim() == 2


def _is_simple(x: DTensor) -> bool:
    spec = x._spec
    as_it_is = spec.use is None and not spec.pending and spec.plain is spec
    return as_it_is and x.dtype.is_floating_point and x.is_contiguous()


NODES: dict[Any, Node] = {nn_functions.linear: Node(Linear, _fits_linear)}

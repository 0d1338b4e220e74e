"""Functions of several ops that are one node of the graph of gradients, where all that they do is local.

`F.linear` of three dims is four ops, and seven more backward, `F.rms_norm` six and twelve. Each is a way
through torch's dispatcher to our class and back: a few microseconds where caches are warm, several times that
behind a product that has filled them, which is where models call it. As one node it is one local call
forward. Backward each gradient is a function of tensors, known as a whole or run op by op, with the moves and
layouts of its ops: what a node decides is how many ways there are, never a layout.

`whole_functions` learns which calls are such: those whose ops are, where no gradient is asked for, the
function on the local tensors. Elsewhere the graph is torch's own, and where somebody looks at the ops or at
what is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from shardwright.compat import nn_functions, will_run
from shardwright.layout.layout import all_hold_some
from shardwright.remember import memo
from shardwright.rules.call import Args, Kwargs
from shardwright.tensor import finished_forms
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
    names:    of the function's arguments; those with a default have None.
    """

    function: type[torch.autograd.Function]
    fits: Callable[..., bool]
    names: tuple[str, ...]

    def in_order(self, args: Args, kwargs: Kwargs) -> Args:
        """All arguments by their places."""
        return (*args, *(kwargs.get(name) for name in self.names[len(args) :]))


def is_wanted(func: Any, args: Args) -> bool:
    """Is it a call of such a function that records a gradient?"""
    records = func in NODES and torch.is_grad_enabled()
    return records and any(isinstance(x, DTensor) and x.requires_grad for x in args)


def node_of(func: Any, args: Args, kwargs: Kwargs, spec: Spec) -> Callable[..., Any] | bool:
    """What runs the calls of this key as one node; False: they may not be one.

    Args: spec: of the result. The same on all ranks: nothing but layouts is asked.
    """
    node = NODES[func]
    ordered = node.in_order(args, kwargs)
    layouts = [x._spec.layout for x in ordered if isinstance(x, DTensor)]
    if not node.fits(*ordered) or not all(map(all_hold_some, (spec.layout, *layouts))):
        return False
    # past `Function.apply` in Python, as `tensor.autograd.apply`: no transform is on, and nothing is compiled
    run = partial(super(torch.autograd.Function, node.function).apply, spec)  # type: ignore[misc]
    if not kwargs and not any(map(_is_pending, args)):
        return run
    name = f"aten::{func.__name__}"

    def call(*given: Any, **named: Any) -> Any:
        """The call, once what is pending is finished; NotImplemented: finished forms are not kept here."""
        if any(_is_pending(x) and finished_forms.form_of(name, x) is None for x in given):
            return NotImplemented
        return run(*node.in_order(given, named))

    return call


def on_forms(args: Args) -> Args | None:
    """The arguments, of pending ones the finished forms; None: of one there is none."""
    if not any(map(_is_pending, args)):
        return args
    forms = {id(x): finished_forms.known(x) for x in args if _is_pending(x)}
    unknown = any(form is None for form in forms.values())
    return None if unknown else tuple(forms.get(id(x), x) for x in args)


def _is_pending(x: object) -> bool:
    return isinstance(x, DTensor) and x._spec.pending


class Linear(torch.autograd.Function):
    """`F.linear` on local tensors. Backward: the products in the order of torch's own graph."""

    @staticmethod
    def forward(ctx: Any, spec: Spec, x: DTensor, weight: DTensor, bias: DTensor | None = None) -> DTensor:
        """The local product."""
        Linear.keep(ctx, x, weight, bias)
        local = None if bias is None else bias._local_tensor
        return wrap(nn_functions.linear(x._local_tensor, weight._local_tensor, local), spec)

    @staticmethod
    def keep(ctx: Any, x: DTensor, weight: DTensor, bias: DTensor | None) -> None:
        """Save what the gradients that are wanted are made of."""
        ctx.set_materialize_grads(False)
        wanted = ctx.needs_input_grad
        ctx.save_for_backward(x if wanted[2] else None, weight if wanted[1] else None)
        ctx.order = (1, 0) if bias is None else (0, 1, 2)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the operands that the running backward wants."""
        found: list[torch.Tensor | None] = [None, None, None]
        x, weight = ctx.saved_tensors
        for place in ctx.order if grad is not None else ():
            if ctx.needs_input_grad[1 + place] and will_run(ctx, place):
                # what the product before this one finished, perhaps: then it is a whole function again
                given = grad if torch.is_grad_enabled() else _form(grad)
                found[place] = _run(_GRADIENTS[place], given, (weight, x, None)[place])
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


def _fits_linear(x: Any, weight: Any, bias: Any = None) -> bool:
    """Rows on a matrix, as they are: finished, of real numbers, row by row in memory."""
    given = [x, weight] if bias is None else [x, weight, bias]
    are_simple = all(type(each) is DTensor and is_simple(each) for each in given)
    return are_simple and x.dim() >= 2 and weight.dim() == 2


def is_simple(x: DTensor) -> bool:
    """Is what it holds its value as it is, row by row in memory?"""
    spec = x._spec
    as_it_is = spec.use is None and not spec.pending and spec.plain is spec
    return as_it_is and x.dtype.is_floating_point and x.is_contiguous()


class RmsNorm(torch.autograd.Function):
    """`F.rms_norm` on local tensors, of a pending input on that of its finished form.

    Backward: the form again, and the gradient as it comes: in a pending one the norm's are linear.
    """

    @staticmethod
    def forward(
        ctx: Any, spec: Spec, x: DTensor, shape: Sequence[int], weight: DTensor | None, eps: float | None
    ) -> DTensor:
        """Save the operands; what is computed of them is small beside them, and made again."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.dims = eps, tuple(range(-len(shape), 0))
        local = None if weight is None else weight._local_tensor
        return wrap(torch.rms_norm(_form(x)._local_tensor, shape, local, eps), spec)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the input and the weight that the running backward wants."""
        x, weight = ctx.saved_tensors
        wanted = [grad is not None and ctx.needs_input_grad[i] and will_run(ctx, i // 2) for i in (1, 3)]
        if not any(wanted):
            return (None,) * 5
        if not torch.is_grad_enabled():  # a form is no function of what it is of, to autograd
            x, grad = _form(x), _form(grad)
        scale = _run(_scale, x, ctx.dims, torch.finfo(x.dtype).eps if ctx.eps is None else ctx.eps)
        of_x = _run(_of_scaled, grad, x, scale, weight, ctx.dims) if wanted[0] else None
        of_weight = _run(_of_its_weight, grad, x, scale, len(ctx.dims)) if wanted[1] else None
        return None, of_x, None, of_weight, None


def _form(x: Any) -> Any:
    form = finished_forms.known(x) if _is_pending(x) else None
    return x if form is None else form


def _run(func: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    found: torch.Tensor = DTensor.__torch_function__(func, (DTensor,), args)
    return found


def _scale(x: torch.Tensor, dims: tuple[int, ...], eps: float) -> torch.Tensor:
    return (x.pow(2).mean(dims, keepdim=True) + eps).rsqrt()


def _of_scaled(
    grad: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor | None,
    dims: tuple[int, ...],
) -> torch.Tensor:
    grad, normed = grad if weight is None else grad * weight, x * scale
    return (grad - normed * (grad * normed).mean(dims, keepdim=True)) * scale


def _of_its_weight(grad: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, dims: int) -> torch.Tensor:
    return (grad * (x * scale)).sum(tuple(range(grad.dim() - dims)))


# Functions of our own that may be whole, as torch's are; called by backwards alone.
WHOLE = frozenset((*_GRADIENTS, _scale, _of_scaled, _of_its_weight))


def _fits_rms_norm(x: Any, shape: Any, weight: Any, eps: Any) -> bool:
    """Rows that are whole on each rank, finished or finished before they are read."""
    single = x.dtype in {torch.float32, torch.float64}  # others are computed in a wider one
    weighs = weight is None or (type(weight) is DTensor and is_simple(weight) and weight.dtype == x.dtype)
    lies = type(x) is DTensor and x._spec.use is None and x.is_contiguous() and x.dim() > len(shape)
    return single and weighs and lies and isinstance(eps, float | None)


NODES: dict[Any, Node] = {
    nn_functions.linear: Node(Linear, _fits_linear, ("input", "weight", "bias")),
    torch.nn.functional.rms_norm: Node(
        RmsNorm, _fits_rms_norm, ("input", "normalized_shape", "weight", "eps")
    ),
}

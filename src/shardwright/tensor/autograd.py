"""The differentiable ways into, out of and between layouts."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import (
    batch_of_gradients,
    compiler_names,
    is_batch_of_gradients,
    is_held_elsewhere,
    level_of_batches,
    members_of_batch,
    transforms_on,
)
from shardwright.layout.layout import Layout
from shardwright.placement.base import Pending
from shardwright.remember import remembered
from shardwright.tensor.between import acceptable_between
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.graph_spec import GraphSpec
from shardwright.tensor.local_use import gradient_inside, kept_of, of_this_rank, restored
from shardwright.tensor.move import move_asked, move_to_spec
from shardwright.tensor.spec import Spec, Token, finished, spec_of, with_dtype
from shardwright.tensor.wrap import as_ours, hand_out, hold_outside, up_to_date, wrap


def acceptable_gradient(source: Layout, gradient: Layout) -> Layout:
    """The cheapest layout that a gradient may have for a value of layout `source`.

    A replicated value takes a pending sum as well as a finished gradient, whichever it already is.
    """
    if source.mesh_shape != gradient.mesh_shape:
        return acceptable_between(source, gradient)
    chosen = []
    for want, have in zip(source.placements, gradient.placements, strict=True):
        keep = want.is_replicated and isinstance(have, Pending) and have.linear
        chosen.append(have if keep else want.dual())
    return gradient.with_placements(tuple(chosen), order=source.order_names)


def apply(function: Any, *args: Any) -> DTensor:
    """`function.apply`, typed: torch leaves it without annotations.

    Past the part in Python, which is as long as all the rest: it looks for a `setup_context`, which functions
    for DTensors do not have, and into plain arguments for what a transform has left (`unwrap_if_dead`).
    """
    if transforms_on() or compiler_names["_is_compiling_flag"] or torch.compiler.is_dynamo_compiling():
        out: DTensor = function.apply(*args)
    else:
        out = super(torch.autograd.Function, function).apply(*args)
    return out


def differentiated(grad: torch.Tensor) -> bool:
    """Is this backward recorded for a second one?"""
    return torch.is_grad_enabled() and grad.requires_grad


Backward = TypeVar("Backward", bound=Callable[..., Any])


def one_by_one(backward: Backward) -> Backward:
    """A backward that also takes a batch of gradients (`is_grads_batched`, `jacobian(vectorize=True)`).

    Its members are taken one after another: what they are inside of a batch has no layout.
    """

    @wraps(backward)
    def each(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is None or not is_batch_of_gradients(grad):
            return backward(ctx, grad)
        level = level_of_batches()
        found = zip(*(backward(ctx, one) for one in members_of_batch(grad, level, 0, 0)), strict=True)
        return tuple(
            None if members[0] is None else batch_of_gradients(torch.stack(members), 0, level)
            for members in found
        )

    return cast("Backward", each)


class FromLocal(torch.autograd.Function):
    """local tensor -> DTensor. Backward: the local part of the gradient in `grad_layout`'s placements."""

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, layout: Layout | Spec, mesh: DeviceMesh, grad_layout: Layout
    ) -> torch.Tensor:
        ctx.grad_layout, ctx.mesh = grad_layout, mesh
        ctx.set_materialize_grads(False)
        return adopted(local, layout if isinstance(layout, Spec) else spec_of(layout, mesh))

    @staticmethod
    @one_by_one
    def backward(ctx: Any, grad: DTensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        if grad is None:
            return None, None, None, None
        own, wanted = grad._spec, ctx.grad_layout
        if isinstance(own, GraphSpec) and not differentiated(grad):
            spec = own.placed(lambda x: x.with_placements(wanted.placements, order=wanted.order_names))
            local = move_to_spec(grad, spec, reason="gradient of from_local")
            return _own_part(local, grad), None, None, None
        target = own.layout.with_placements(wanted.placements, order=wanted.order_names)
        if differentiated(grad):
            moved = redistributed(grad, target, grad.device_mesh)
            return to_local(moved, finished(target)), None, None, None
        local = move_asked(grad, target, reason="gradient of from_local")
        return _own_part(local, grad), None, None, None


def adopted(local: torch.Tensor, spec: Spec) -> DTensor:
    """The DTensor of a local tensor that the program goes on holding; not differentiable."""
    hold_outside("from_local")
    return wrap(hand_out(local.detach()) if spec.pending else local.detach(), spec)


class ToLocal(torch.autograd.Function):
    """DTensor -> local tensor. Backward: the local gradient is a DTensor of `grad_layout`."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, grad_layout: Layout | Spec) -> torch.Tensor:
        ctx.grad_layout, ctx.mesh = grad_layout, x.device_mesh
        ctx.set_materialize_grads(False)
        up_to_date(x)
        return _counted_with_its_base(x)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        if grad is None:
            return None, None
        if isinstance(ctx.grad_layout, GraphSpec) and not differentiated(grad):
            spec = ctx.grad_layout.placed(lambda x: with_dtype(x, grad.dtype))
            return wrap_gradient(grad, spec, grad), None
        layout = with_dtype(_numbers(ctx.grad_layout), grad.dtype)
        if differentiated(grad):
            return apply(FromLocal, grad, layout, ctx.mesh, finished(layout)), None
        return wrap_gradient(grad, spec_of(layout, ctx.mesh), grad), None


def _counted_with_its_base(x: DTensor) -> torch.Tensor:
    """The local tensor as a view that counts what is written into it, of a view with all that its base is.

    torch makes local views below autograd, where each has a count of its own: what is written into the base
    would not be seen by what has saved the local part of a view.
    """
    local, base = x._local_tensor, x._base
    if not isinstance(base, DTensor) or torch.compiler.is_compiling():
        return local.view_as(local)
    whole = base._local_tensor
    memory = whole.untyped_storage()
    alike = whole.is_conj() == local.is_conj() and whole.is_neg() == local.is_neg()
    if not alike or memory._cdata != local.untyped_storage()._cdata:
        return local.view_as(local)  # a copy, which no write reaches
    length = memory.nbytes() // local.element_size() * local.element_size() // whole.element_size()
    flat = whole.as_strided((length,), (1,), 0).view(local.dtype)
    return flat.as_strided(local.shape, local.stride(), local.storage_offset())


def _numbers(described: Layout | Spec) -> Layout:
    return described.layout if isinstance(described, Spec) else described


def wrap_gradient(local: torch.Tensor, spec: Spec, came: torch.Tensor) -> DTensor:
    """The gradient of this local part, which may be that of the gradient that came."""
    if isinstance(came, DTensor) and local is came._local_tensor and came._spec is spec:
        return came
    return wrap(_own_part(local, came), spec)


def _own_part(local: torch.Tensor, came: torch.Tensor) -> torch.Tensor:
    """A local part for a new holder: a copy where it is that of a gradient which others got too.

    torch keeps the first gradient of a leaf without a copy when nobody else refers to it. It would look at
    the new holder, and take what the others have (`x.to_local() + y.to_local()`).
    """
    is_same = local is came or (isinstance(came, TorchDTensor) and local is came._local_tensor)
    return local.clone() if is_same and is_held_elsewhere(came) else local


def to_local(x: DTensor, grad_layout: Layout | Spec) -> torch.Tensor:
    """The local tensor of `x`, which needs a gradient; the gradient has `grad_layout`."""
    local: torch.Tensor = apply(ToLocal, x, grad_layout)
    return local


class Redistribute(torch.autograd.Function):
    """DTensor -> DTensor of another spec. Backward: from the layout that the gradient has."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, target: Spec) -> torch.Tensor:
        spec = x._spec
        ctx.source = spec if type(spec) is GraphSpec else spec.token
        ctx.set_materialize_grads(False)
        up_to_date(x)
        local = move_to_spec(x, target, reason="redistribute")
        if local is x._local_tensor:
            local = local.view_as(local)
        return wrap(local, target)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, grad: DTensor | None) -> tuple[torch.Tensor | None, None]:
        if grad is None:
            return None, None
        known, spec = ctx.source, grad._spec
        target = gradient_spec(known, spec.token) if type(known) is Token else gradient_of(known, grad)
        if differentiated(grad):
            return apply(Redistribute, grad, target), None
        local = move_to_spec(grad, target, reason="gradient of redistribute")
        return wrap_gradient(local, target, grad), None


def redistributed(x: DTensor, target: Layout, mesh: DeviceMesh) -> DTensor:
    """`x` in a layout on a mesh, its own or another one: differentiable."""
    use = x._spec.use if mesh == x.device_mesh else None
    if isinstance(x._spec, GraphSpec) and mesh == x.device_mesh:
        return apply(Redistribute, x, x._spec.placed(lambda _: target))
    return apply(Redistribute, x, spec_of(target, mesh, use))


def known_by(x: DTensor) -> Any:
    """What tells `gradient_of` the layout of `x`."""
    return x._spec if isinstance(x._spec, GraphSpec) else x._spec.token


def gradient_of(source: Any, gradient: DTensor) -> Spec:
    """What a gradient becomes for a value that is `known_by` this."""
    spec = gradient._spec
    if isinstance(spec, GraphSpec) and isinstance(source, GraphSpec):
        return spec.placed(lambda own: acceptable_gradient(source.shown.layout, own))
    return gradient_spec(source.fix().token if isinstance(source, GraphSpec) else source, spec.token)


@remembered(16384)
def gradient_spec(source: Token, gradient: Token) -> Spec:
    """What a gradient of one spec becomes for a value that had the other."""
    target = acceptable_gradient(source.spec.layout, gradient.spec.layout)
    return spec_of(target, source.spec.mesh)


class Adopt(Redistribute):
    """torch's own DTensor -> ours, of the same layout.

    Backward: the gradient is brought to a layout that torch's functions know. Ours can have any: what an op
    makes of no rows, say, has the layout of its only holder.
    """

    @staticmethod
    def forward(ctx: Any, x: TorchDTensor) -> torch.Tensor:  # type: ignore[override]
        ours = as_ours(x)
        ctx.source = known_by(ours)
        ctx.set_materialize_grads(False)
        return ours

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> torch.Tensor | None:  # type: ignore[override]
        moved: torch.Tensor | None = Redistribute.backward(ctx, grad)[0]
        return moved


class Localize(torch.autograd.Function):
    """Parameter -> what the computation sees of it: its local tensor, or a DTensor on the axes that are left.

    Backward: on the axes that are left the gradient is brought to the parameter's own placements, whatever
    the data made of it there, or to terms of a sum where they are added up later; it gets the other axes
    back, Pending(sum) on those where ranks still differ.
    So its layout follows from the parameter alone: ranks with other rows, or none, agree without asking.
    """

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> torch.Tensor:
        ctx.spec = x._spec
        ctx.of_leaf = x.is_leaf
        ctx.version = x._version if ctx.needs_input_grad[0] else None
        ctx.set_materialize_grads(False)
        local = x._local_tensor.view_as(x._local_tensor)
        inner = kept_of(x._spec.token)
        return local if inner is None else wrap(local, inner)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        if grad is None:
            return None
        leaf = _leaf(ctx) if ctx.of_leaf else None
        if leaf is not None and leaf._version != ctx.version:  # the local tensor need not count its writes
            raise RuntimeError(
                f"a parameter {tuple(leaf.shape)} of this graph has been modified by an inplace operation"
            )
        inner = gradient_inside(ctx.spec.token)
        if inner is None and isinstance(grad, TorchDTensor):  # of what counted as replicated on other axes
            seen = as_ours(grad)._spec.layout
            own = of_this_rank(ctx.spec, seen, grad.device_mesh)
            grad = to_local(redistributed(as_ours(grad), own, grad.device_mesh), seen.replicated())
        if differentiated(grad):
            if inner is not None:
                target = with_dtype(inner.layout, grad.dtype)
                grad = redistributed(cast("DTensor", grad), target, inner.mesh)
            return apply(RestoreAxes, grad, ctx.spec)
        if inner is not None:
            grad = _brought_to(inner, cast("DTensor", grad))
        local, spec = restored(ctx.spec, grad)
        if leaf is not None and leaf.grad is not None:
            keep_pending(leaf, spec.layout)
        elif id(leaf) not in taken_at_once:
            local = _own_copy(local, leaf)
        return wrap(local, spec)


def _leaf(ctx: Any) -> Any:
    """The leaf to which this node's gradient goes, read off the graph.

    Not by a reference to it, weak or not: torch swaps no parameter that has one (`module.to(dtype)`).
    """
    into = next(iter(getattr(ctx, "next_functions", ())), (None, 0))[0]
    return getattr(into, "variable", None)


# The ids of leaves, which their listener holds, whose gradients it takes at once and never writes into.
taken_at_once: set[int] = set()


def _brought_to(inner: Spec, grad: DTensor) -> DTensor:
    """A gradient in a layout, and its own dtype."""
    target = with_dtype(inner.layout, grad.dtype)
    return wrap(move_asked(grad, target, reason="gradient of a parameter"), spec_of(target, inner.mesh))


def _own_copy(local: torch.Tensor, parameter: DTensor | None) -> torch.Tensor:
    """A part that nobody else holds, laid out like the parameter's.

    torch keeps a first gradient without a copy when nobody else refers to it. It looks at the new wrapper,
    not at the local tensor inside, which may be another parameter's gradient too (x + a + b), or expanded.
    """
    if parameter is None or parameter._local_tensor.shape != local.shape:
        return local.clone()
    return torch.empty_like(parameter._local_tensor, dtype=local.dtype).copy_(local)


class RestoreAxes(torch.autograd.Function):
    """The gradient of what a computation saw of a parameter -> the parameter's gradient; see `Localize`."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, spec: Spec) -> torch.Tensor:
        ctx.inner = kept_of(spec.token)
        ctx.set_materialize_grads(False)
        local, restored_spec = restored(spec, grad.detach())
        ctx.layout = restored_spec.layout
        return wrap(local, restored_spec)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[torch.Tensor | None, None]:
        if grad is None:
            return None, None
        target = with_dtype(finished(ctx.layout), grad.dtype)
        local = move_asked(grad, target, reason="second gradient of a parameter")
        if ctx.inner is None:
            return local, None
        left = dict(zip(target.axes, target.placements, strict=True))
        layout = ctx.inner.layout.with_placements({axis: left[axis] for axis in ctx.inner.layout.axes})
        return wrap(local, spec_of(layout, ctx.inner.mesh)), None


def keep_pending(leaf: torch.Tensor, layout: Layout) -> None:
    """Let torch add a gradient of this layout to that of a leaf without communication, see `as_term`."""
    if (before := leaf.grad) is not None:
        leaf.grad = as_term(before, layout)


def as_term(gradient: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A gradient that was summed already, as a term of the next sum: no communication.

    torch adds the next backward's term in place. Into a finished value that would be a reduction inside the
    backward, which a rank that does not use the parameter never joins.
    """
    if not isinstance(gradient, TorchDTensor) or tuple(gradient.placements) == layout.placements:
        return gradient
    return as_ours(gradient).redistribute(placements=layout.placements, order=layout.order_names)

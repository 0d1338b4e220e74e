"""`redistribute`: the full look at what is asked, and what need not be done again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwright.compat import (
    DisableTorchFunctionSubclass,
    is_batch_of_gradients,
    is_held_elsewhere,
    transforms_on,
)
from shardwright.errors import LayoutError, refuse_other_kind
from shardwright.placement.base import Placement
from shardwright.remember import memo
from shardwright.tensor.autograd import (
    Redistribute,
    apply,
    gradient_of,
    gradient_spec,
    known_by,
    one_by_one,
    redistributed,
)
from shardwright.tensor.between import layout_on
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.graph_spec import GraphSpec, of_sizes
from shardwright.tensor.placements import TORCHS, PlacementsArgument, mesh_and_placements
from shardwright.tensor.spec import Spec, Token, spec_of
from shardwright.tensor.views.write_back import known_as
from shardwright.tensor.wrap import knots, wrap


def redistribute(
    x: DTensor,
    mesh: DeviceMesh | PlacementsArgument | None,
    placements: PlacementsArgument | None,
    *,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
    order: Sequence[str] | None,
    async_op: bool = False,
) -> DTensor:
    """See `DTensor.redistribute`."""
    if forward_dtype is None and backward_dtype is None and order is None and not async_op:
        known = _known_target(x, mesh, placements)
        if known is not None:
            if known.token is x._spec.shown.token:
                return unmoved(x)
            spec = x._spec
            return apply(Redistribute, x, of_sizes(known, spec.sizes) if type(spec) is GraphSpec else known)
    refuse_other_kind("redistribute: async_op", async_op, bool, LayoutError, fix="True or False")
    for name, dtype in (("forward_dtype", forward_dtype), ("backward_dtype", backward_dtype)):
        if dtype is not None:
            refuse_other_kind(f"redistribute: {name}", dtype, torch.dtype, LayoutError, fix="torch.float32")
    mesh, given = mesh_and_placements("redistribute", mesh, placements)
    home = x.device_mesh if mesh is None else mesh
    if forward_dtype is not None and forward_dtype != x.dtype:
        x = cast("DTensor", x.to(forward_dtype))
    if backward_dtype is not None:
        x = apply(_CastGradient, x, backward_dtype)
    target = layout_on(x, home, given, order)
    if async_op and home == x.device_mesh and x._spec.use is None and not torch.compiler.is_compiling():
        return knots.start(x, target)
    return redistributed(x, target, home)


def replicated(x: DTensor) -> DTensor:
    """The same tensor, whole and finished on every rank."""
    target = x._spec.shown.layout.replicated()
    if target == x._spec.shown.layout:
        return x
    return redistributed(x, target, x.device_mesh)


def _known_target(x: DTensor, mesh: Any, placements: Any) -> Spec | None:
    """The spec that these placements mean for `x` on its own mesh, made once; that of `x` if it has them.

    None: on another mesh, of another kind of argument, or in an order of its own: a full look must tell.
    Args: as `redistribute` got them: placements may stand where a mesh may.
    """
    spec = x._spec.shown
    if placements is None:
        given = mesh
    elif mesh is None or mesh is spec.mesh:
        given = placements
    else:
        return None
    kind = type(given)
    if kind is list or kind is tuple:
        key = (spec.token, *given)
    elif kind is dict:
        key = (spec.token, *given.items())
    else:
        return None
    for placement in given.values() if kind is dict else given:
        if not isinstance(placement, Placement) and type(placement) not in TORCHS:
            return None  # equal to one of ours it might mean something else
    try:
        known = _targets.get(key)
    except TypeError:  # one cannot be hashed, which a full look says in words
        return None
    return _new_target(key, x, given) if known is None else known


_MANY_TARGETS = 16384
_targets: dict[tuple[Any, ...], Spec] = memo("targets of redistributions", {})


def _new_target(key: tuple[Any, ...], x: DTensor, given: Any) -> Spec:
    spec = x._spec.shown
    if type(given) is dict or len(given) != len(spec.placements):
        layout = layout_on(x, spec.mesh, given)
    else:
        layout = spec.layout.with_placements(given)
    target = spec_of(layout, spec.mesh, spec.use)
    if len(_targets) >= _MANY_TARGETS:
        _targets.clear()
    _targets[key] = target
    return target


def unmoved(x: DTensor) -> DTensor:
    """A view of `x`, whose gradient is brought to the layout of `x`, as that of any redistribution.

    It shares the memory, so it shares the graph: a write into either of them is one into both, and is refused
    where torch refuses one into a view (of a leaf, of one of several results).
    """
    if transforms_on():
        return apply(_Same, x)
    traced = torch.compiler.is_compiling()
    with DisableTorchFunctionSubclass():
        if not torch.is_grad_enabled() or not x.requires_grad:  # memory and count of writes are all to share
            return cast("DTensor", x.detach())
        view = cast("DTensor", x[...])
        brings = partial(_brought_in_graph, known_by(x)) if traced else partial(_brought, x._spec.token)
        view.register_hook(brings)  # type: ignore[no-untyped-call]
    if traced:  # who gets it from the graph gets it anew of the argument
        known_as(view, torch.ops.shardwright.unmoved.default)
    return view


def _brought_in_graph(source: Any, gradient: DTensor) -> DTensor:
    return apply(Redistribute, gradient, gradient_of(source, gradient))


_library = torch.library.Library("shardwright", "FRAGMENT")
_library.define("unmoved(Tensor(a) x) -> Tensor(a)")
_library.impl("unmoved", unmoved, "CompositeImplicitAutograd")


def _brought(source: Token, gradient: DTensor | None) -> DTensor | None:
    if gradient is None:  # a derivative gave none
        return None
    if is_batch_of_gradients(gradient):
        return _each_brought(source, gradient)[0]
    if gradient._spec.token is source:  # what is a view of it is kept by a leaf, as if it were its own
        return cast("DTensor", gradient.clone()) if is_held_elsewhere(gradient, in_a_hook=True) else None
    return apply(Redistribute, gradient, gradient_spec(source, gradient._spec.token))


@one_by_one
def _each_brought(source: Token, gradient: DTensor) -> tuple[DTensor]:
    return (apply(Redistribute, gradient, gradient_spec(source, gradient._spec.token)),)


class _Same(Redistribute):
    """The same where neither views nor hooks are followed: in transforms of functions."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> torch.Tensor:  # type: ignore[override]
        ctx.source = known_by(x)
        ctx.set_materialize_grads(False)
        local = x._local_tensor
        return wrap(local.view_as(local), x._spec)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> torch.Tensor | None:  # type: ignore[override]
        return Redistribute.backward(ctx, grad)[0]


class _CastGradient(torch.autograd.Function):
    """Identity whose gradient is cast before it travels back."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtypes = (x.dtype, dtype)  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.to(ctx.dtypes[0]), None  # type: ignore[attr-defined]

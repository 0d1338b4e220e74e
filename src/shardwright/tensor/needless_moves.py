"""What a redistribution need not do again: make the spec it leads to, or move to the layout that it has."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor.placement_types import Partial as TorchPartial
from torch.distributed.tensor.placement_types import Replicate as TorchReplicate
from torch.distributed.tensor.placement_types import Shard as TorchShard

from shardwright.compat import DisableTorchFunctionSubclass
from shardwright.placement.base import Placement
from shardwright.remember import memo
from shardwright.tensor.autograd import Redistribute, apply
from shardwright.tensor.between import layout_on
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.spec import Spec, spec_of
from shardwright.tensor.wrap import wrap


def known_target(x: DTensor, mesh: Any, placements: Any) -> Spec | None:
    """The spec that these placements mean for `x` on its own mesh, made once; that of `x` if it has them.

    None: on another mesh, of another kind of argument, or in an order of its own: a full look must tell.
    Args: as `redistribute` got them: placements may stand where a mesh may.
    """
    spec = x._spec
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


# Classes of torch whose placements mean what ours do.
TORCHS = frozenset({TorchShard, TorchReplicate, TorchPartial})
_MANY_TARGETS = 16384
_targets: dict[tuple[Any, ...], Spec] = memo("targets of redistributions", {})


def _new_target(key: tuple[Any, ...], x: DTensor, given: Any) -> Spec:
    spec = x._spec
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
    """A new tensor that shares the local tensor of `x`, differentiable, as a redistribution would give."""
    with DisableTorchFunctionSubclass():
        differentiated = torch.is_grad_enabled() and x.requires_grad
    if differentiated:
        return apply(_Unmoved, x)
    local = x._local_tensor
    return wrap(local.view_as(local), x._spec)


class _Unmoved(Redistribute):
    """Its gradient may have another layout, and is brought back as that of any redistribution."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> torch.Tensor:  # type: ignore[override]
        ctx.source = x._spec.token
        ctx.set_materialize_grads(False)
        local = x._local_tensor
        return wrap(local.view_as(local), x._spec)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> torch.Tensor | None:  # type: ignore[override]
        return Redistribute.backward(ctx, grad)[0]

"""What `from_local` makes of a part, where one like it was given before: nothing is resolved twice."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.compat import forward_names, transforms_on, unwrap_if_dead
from shardwright.layout.layout import Layout
from shardwright.placement.base import Placement
from shardwright.remember import memo
from shardwright.tensor.autograd import FromLocal, adopted, apply
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.placements import TORCHS
from shardwright.tensor.spec import Spec, finished

_MANY = 16384


class Part(NamedTuple):
    """What such a part makes.

    spec: of the whole. grad_layout: where its gradient is brought. mesh: as it was given; held, so that no
        other one has its `id` meanwhile.
    """

    spec: Spec
    grad_layout: Layout
    mesh: DeviceMesh

    def adopt(self, local: torch.Tensor) -> DTensor:
        """The DTensor of a local tensor like the first."""
        forward = forward_names["_current_level"] >= 0
        if (torch.is_grad_enabled() and local.requires_grad) or forward:
            return apply(_FromPart, unwrap_if_dead(local), self.spec, self.grad_layout)
        return adopted(local, self.spec)


class _FromPart(FromLocal):
    """Its gradient is brought back as that of any local tensor."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: Spec, grad_layout: Layout) -> torch.Tensor:  # type: ignore[override]
        ctx.grad_layout = grad_layout
        ctx.set_materialize_grads(False)
        return adopted(local, spec)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[torch.Tensor | None, None, None]:  # type: ignore[override]
        return FromLocal.backward(ctx, grad)[0], None, None


parts: dict[tuple[Any, ...], Part] = memo("parts that from_local was given", {})


def key_of(local: Any, mesh: Any, placements: Any) -> tuple[Any, ...] | None:
    """What decides what a part makes; None: a full look must tell."""
    if torch.compiler.is_compiling() or transforms_on():
        return None
    if type(local) not in _PLAIN or type(mesh) is not DeviceMesh:
        return None
    kind = type(placements)
    if kind is dict:
        given, key = placements.values(), (*placements.items(),)
    elif kind is list or kind is tuple:
        given, key = placements, (*placements,)
    else:
        return None
    for placement in given:
        if not isinstance(placement, Placement) and type(placement) not in TORCHS:
            return None  # equal to one of ours it might mean something else
    made = id(mesh), kind is dict, local.shape, local.stride(), local.dtype, local.layout, *key
    try:
        hash(made)
    except TypeError:  # a size or a placement that cannot be hashed, which a full look says in words
        return None
    return made


_PLAIN = frozenset({torch.Tensor, nn.Parameter})


def learn(key: tuple[Any, ...], mesh: DeviceMesh, made: DTensor) -> None:
    """Write down what a part made."""
    if len(parts) >= _MANY:
        parts.clear()
    parts[key] = Part(made._spec, finished(made._spec.layout), mesh)

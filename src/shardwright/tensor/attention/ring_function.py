"""The ring as a function of DTensors with a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from shardwright.comm.ring import Ring
from shardwright.errors import PlanError
from shardwright.layout.layout import Layout
from shardwright.tensor.attention.choice import CutCall
from shardwright.tensor.attention.ring import Call, Pair, ring_backward, ring_forward
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.move import move_asked
from shardwright.tensor.spec import spec_of, with_dtype
from shardwright.tensor.wrap import up_to_date, wrap

_NAME = "scaled_dot_product_attention"


@dataclass(frozen=True)
class Facts:
    """What both passes of a ring need to know."""

    cut: CutCall
    result: Layout
    causal: bool
    scale: float
    blocking: bool

    def at(self, query: DTensor, mask: torch.Tensor | None, reason: str) -> Call:
        """The call as this rank sees it."""
        cut, coords, mesh = self.cut, query._spec.coords, query.device_mesh
        if coords is None:
            raise PlanError(f"{_NAME}: this rank is not in the mesh of the operands")
        group = mesh.get_group(cut.axes[0]) if len(cut.axes) == 1 else None
        own = cut.keys.own(cut.key, coords)
        ring = Ring(cut.ring(coords), own, group, cut.axis_names, reason, self.blocking)
        queries = cut.queries.held[cut.queries.own(cut.query, coords)]
        return Call(ring, queries, cut.keys.held, self.causal, self.scale, mask)


class RingAttention(torch.autograd.Function):
    """Queries, keys and values cut along the sequence -> the result, cut as the queries are."""

    @staticmethod
    def forward(
        ctx: Any, query: DTensor, key: DTensor, value: DTensor, mask: torch.Tensor | None, facts: Facts
    ) -> torch.Tensor:
        """One round: every rank has the results of its own queries."""
        for x in (query, key, value):
            up_to_date(x)
        spec = spec_of(facts.result, query.device_mesh)
        ctx.facts = facts
        if query._spec.coords is None:
            ctx.save_for_backward(query, key, value)
            return wrap(query._local_tensor.new_empty(0), spec)
        call = facts.at(query, mask, f"{_NAME}: keys and values go round")
        own = Pair(key._local_tensor, value._local_tensor)
        if torch.is_autocast_enabled(query.device.type):  # the types were chosen before
            with torch.autocast(query.device.type, enabled=False):
                out, logs = ring_forward(query._local_tensor, own, call)
        else:
            out, logs = ring_forward(query._local_tensor, own, call)
        ctx.save_for_backward(query, key, value, out, logs, mask)
        return wrap(out, spec)

    @staticmethod
    @once_differentiable  # like the kernels of one device
    def backward(ctx: Any, grad: DTensor) -> tuple[torch.Tensor | None, ...]:
        """Another round; the terms of the gradients of keys and values follow these."""
        query, key, value, *saved = ctx.saved_tensors
        facts: Facts = ctx.facts
        result, layout = facts.result, grad._spec.layout
        if not layout.is_placed_as(result):
            layout = layout.with_placements(result.placements, order=result.order_names)
        local = move_asked(grad, layout, reason=f"gradient of {_NAME}")
        if not saved:
            return query, key, value, None, None
        out, logs, mask = saved
        call = facts.at(query, mask, f"gradient of {_NAME}: keys, values and terms go round")
        own = Pair(key._local_tensor, value._local_tensor)
        of_query, of_own = ring_backward(local, query._local_tensor, own, (out, logs), call)
        made = (of_query, of_own.key, of_own.value)
        return *(_like(x, g) for x, g in zip((query, key, value), made, strict=True)), None, None


def _like(x: DTensor, gradient: torch.Tensor) -> DTensor:
    return wrap(gradient.to(x.dtype), spec_of(with_dtype(x._spec.layout, x.dtype), x.device_mesh))

"""Running attention on parts of the keys: each rank its own, then a weighted average of all results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwright.comm.functional import reduce_over
from shardwright.compat import axis_names
from shardwright.layout.layout import Layout
from shardwright.remember import remembered
from shardwright.rules.algorithms.algorithm import register_algorithm
from shardwright.rules.call import Call
from shardwright.rules.catalog.attention import causal_mask
from shardwright.rules.key_parts import KeyParts, plan_key_parts
from shardwright.rules.op import by_name
from shardwright.tensor.attention.kernel import without_numbers
from shardwright.tensor.dispatch.metadata import called
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.explicit_mode import refuse_exchange
from shardwright.tensor.move import move_operands
from shardwright.tensor.spec import coords_of, spec_of
from shardwright.tensor.wrap import wrap

_WHY = "attention to parts of the keys"


@remembered(4096)
def _plan(call: Call, layouts: tuple[Layout, ...]) -> KeyParts | None:
    return plan_key_parts(call, layouts)


def _cost(call: Call, layouts: Sequence[Layout]) -> int | None:
    plan = _plan(call, tuple(layouts))
    return None if plan is None else plan.bytes


@register_algorithm("aten::_scaled_dot_product_flash_attention_for_cpu", cost=_cost)
def on_key_parts(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """attention over cut keys: each rank attends to its own, the results are averaged by their weights."""
    given = by_name(op, args, kwargs)
    tensors = [value for value in given.values() if isinstance(value, DTensor)]
    plan = _plan(called(op, args, kwargs), tuple(x._spec.layout for x in tensors)) if tensors else None
    if plan is None:
        return op(*args, **kwargs)
    mesh = tensors[0].device_mesh
    refuse_exchange(op.name(), plan.bytes, "combine attention to parts of the keys")
    moved = iter(move_operands(op.name(), list(zip(tensors, plan.inputs, strict=True)), _WHY))
    local = {name: next(moved) if isinstance(value, DTensor) else value for name, value in given.items()}
    coords = coords_of(mesh)
    if coords is None:
        made: Sequence[Tensor] = (tensors[0]._local_tensor.new_empty(0),) * 2
    else:
        made = _averaged(*_own(op, local, plan, coords), plan, mesh)
    return tuple(
        wrap(value.to(out.dtype), spec_of(out, mesh))
        for value, out in zip(made, plan.outputs, strict=True)
        if out is not None
    )


def _own(
    op: torch._ops.OpOverload, local: dict[str, Any], plan: KeyParts, coords: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Attention to the keys of this rank, and the log of the sum of each query; -inf where it sees none."""
    query, key, value = local["query"], local["key"], local["value"]
    shape = query.shape[:3]
    if not (query.numel() and key.numel()):
        logs_type = torch.promote_types(query.dtype, torch.float32)  # the kernel's, as on the other ranks
        nothing = query.new_full(shape, -torch.inf, dtype=logs_type)
        return query.new_zeros(*shape, value.shape[-1]), nothing
    if local.get("is_causal"):
        mask = causal_mask(*plan.held(coords), query)
        local = {**local, "is_causal": False, "attn_mask": mask}
    out, logs = op(**local)
    logs = without_numbers(out, logs, query, key)
    hidden: Tensor | None = local.get("attn_mask")
    if hidden is not None:  # the kernel's log is 0 for a query that sees no key
        logs = logs.masked_fill((hidden == -torch.inf).all(-1), -torch.inf)
    return out, logs


def _averaged(out: Tensor, logs: Tensor, plan: KeyParts, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """The attention to all keys:  [b, h, l, v], [b, h, l] on every rank of the axes.

    A query that sees no key anywhere gets zeros, and 0 for the log, as from the kernel.
    """
    top = _over_axes(logs, "max", plan, mesh)
    shift = top.masked_fill(top == -torch.inf, 0)
    weight = (logs - shift).exp()
    terms = torch.cat([out.to(weight.dtype) * weight[..., None], weight[..., None]], dim=-1)
    total = _over_axes(terms, "sum", plan, mesh)
    weights = total[..., -1]
    sees = weights != 0
    made = total[..., :-1] / weights.masked_fill(~sees, 1)[..., None]
    return made, torch.where(sees, shift + weights.log(), 0)


def _over_axes(x: Tensor, op: str, plan: KeyParts, mesh: DeviceMesh) -> Tensor:
    for axis in plan.axes:
        x = reduce_over(x, op, mesh.get_group(axis), axis=axis_names(mesh)[axis], reason=_WHY)
    return x

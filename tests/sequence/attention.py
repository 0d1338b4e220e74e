"""Calls of attention over a cut sequence, each beside plain torch on the whole tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import shardwright as sw
from shardwright.tensor.attention.asked import attention_by

BATCH, HEADS, WIDTH = 2, 6, 4
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass(frozen=True)
class Kind:
    """One way to call attention. shared: heads of the keys; keys: their number, None: as many as queries."""

    mask: str = ""
    shared: int = HEADS
    keys: int | None = None
    width: int = WIDTH
    options: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "full": Kind(),
    "causal": Kind(options={"is_causal": True}),
    "causal, scaled": Kind(options={"is_causal": True, "scale": 0.3}),
    "causal, grouped": Kind(shared=2, options={"is_causal": True, "enable_gqa": True}),
    "one head of keys": Kind(shared=1, options={"enable_gqa": True}),
    "causal, fewer keys": Kind(keys=7, options={"is_causal": True}),
    "causal, more keys": Kind(keys=17, options={"is_causal": True}),
    "other keys": Kind(keys=8),
    "wide values": Kind(width=6, options={"is_causal": True}),
    "wide values, grouped": Kind("window", shared=3, width=3, options={"enable_gqa": True}),
    "window": Kind("window"),
    "documents": Kind("documents", shared=3, options={"enable_gqa": True}),
    "padding": Kind("padding"),
    "added": Kind("added"),
    "added to heads": Kind("added to heads"),
    "2-d": Kind("rows"),
    "nothing seen": Kind("nothing"),
    "hidden by a large number": Kind("large"),
}


def mask_of(name: str, length: int, keys: int, dtype: torch.dtype) -> Tensor | None:
    """A mask that broadcasts to [batch, heads, queries, keys]."""
    at, to = torch.arange(length)[:, None], torch.arange(keys)[None, :]
    made = torch.Generator().manual_seed(3)
    match name:
        case "window":
            return (to <= at) & (at - to < 4)
        case "documents":
            of = torch.stack([torch.arange(max(length, keys)) // 5, torch.arange(max(length, keys)) // 3])
            same = of[:, :length, None] == of[:, None, :keys]
            return (same & (to <= at))[:, None]
        case "padding":
            return torch.stack([to[0] < keys - 3, to[0] >= 2])[:, None, None]
        case "added":
            return torch.randn(BATCH, 1, length, keys, generator=made).to(dtype)
        case "added to heads":
            return torch.randn(HEADS, length, keys, generator=made).to(dtype)
        case "rows":
            hidden = torch.zeros(length, keys).masked_fill(to > at, -torch.inf)
            return hidden.to(dtype)
        case "nothing":
            return (to < at) & (at != 4)
        case "large":
            lowest = torch.finfo(dtype).min
            return torch.zeros(length, keys).masked_fill((to > at) | (at == 3), lowest).to(dtype)
        case _:
            return None


def operands(kind: Kind, length: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries as a projection leaves them in memory, keys, values."""
    made = torch.Generator().manual_seed(1)

    def of(heads: int, size: int, width: int) -> Tensor:
        return torch.randn(BATCH, size, heads, width, generator=made).to(dtype).transpose(1, 2)

    keys = length if kind.keys is None else kind.keys
    return [of(HEADS, length, WIDTH), of(kind.shared, keys, WIDTH), of(kind.shared, keys, kind.width)]


def one_device(kind: Kind, length: int, dtype: torch.dtype) -> list[Tensor]:
    """The result and the gradients of queries, keys and values."""
    plain = [x.clone().requires_grad_() for x in operands(kind, length, dtype)]
    mask = mask_of(kind.mask, length, plain[1].shape[2], dtype)
    out = scaled_dot_product_attention(*plain, attn_mask=mask, **kind.options)
    out.backward(cotangent(out))
    return [out.detach(), *(x.grad for x in plain if x.grad is not None)]


def cotangent(out: Tensor) -> Tensor:
    """A gradient that tells all elements apart."""
    return torch.arange(out.numel()).cos().view(out.shape).to(out.dtype)


def cut(
    kind: Kind, length: int, dtype: torch.dtype, mesh: Any, placements: Any, way: str
) -> tuple[list[Tensor], list[str]]:
    """The same on DTensors; and what the record says of the ways that were gone."""
    keys = placements if not isinstance(placements, dict) else placements["keys"]
    queries = placements if not isinstance(placements, dict) else placements["queries"]
    placed = [
        sw.distribute_tensor(x, mesh, p).requires_grad_()
        for x, p in zip(operands(kind, length, dtype), (queries, keys, keys), strict=True)
    ]
    mask = mask_of(kind.mask, length, placed[1].shape[2], dtype)
    with sw.trace() as t, sw.spmd(mesh, check=False), attention_by(way):
        out = scaled_dot_product_attention(*placed, attn_mask=mask, **kind.options)
        out.backward(sw.distribute_tensor(cotangent(out), mesh, out.placements))
    gone = [d.reason.split(" ")[0] for d in t.decisions if d.op == "scaled_dot_product_attention"]
    assert out.stride() == _stride(kind, length, dtype), "it lies in memory as on one device"
    found = [out.detach(), *(x.grad for x in placed)]
    assert all(g.placements == x.placements for g, x in zip(found[1:], placed, strict=True))
    return [x.full_tensor() for x in found], gone


def _stride(kind: Kind, length: int, dtype: torch.dtype) -> tuple[int, ...]:
    return one_device(kind, length, dtype)[0].stride()


def differing(found: list[Tensor], wanted: list[Tensor]) -> list[str]:
    """What is not one device's, within the rounding of its type."""
    lines = []
    for name, got, want in zip(("result", "query", "key", "value"), found, wanted, strict=True):
        off = (got.double() - want.double()).abs().max().item()
        if got.dtype != want.dtype or not off <= TOLERANCE[want.dtype] * max(1.0, want.abs().max().item()):
            lines.append(f"{name}: off by {off:.1e}")
    return lines

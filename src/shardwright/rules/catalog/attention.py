"""Scaled-dot-product attention kernels: batch, heads and the sequence of queries may be cut.

Where several queries share a head of keys, a plain cut of the heads is one of whole groups. Queries may also
be cut between any heads, beside keys that are whole: a rank takes the heads of keys that its queries share.

With a causal mask the positions matter: a rank makes the mask of the queries and keys that it holds, so the
queries may be cut by any partition. Keys and values are whole in the forward (an algorithm of its own
combines parts of them); in the backward, where the log of the sums is known, they may be cut as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.rules.call import Call, Op, TensorInfo
from shardwright.rules.catalog.labels import join
from shardwright.rules.formula import Formula, formula
from shardwright.rules.held_label import Held
from shardwright.rules.op import by_name
from shardwright.rules.rule import register_rule

ATTENTION = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
)


class _Labels:
    """The items of queries, keys and the rest for one call."""

    def __init__(self, call: Call, *, keys: str = "s!", any_heads: bool = False) -> None:
        grouped = is_grouped(call)
        by_position = bool(call.arg("is_causal")) and (any_heads or not takes_mask(call))
        self.head = "(k g)" if grouped and not any_heads else "h"
        self.shared_head = "_" if any_heads else "k" if grouped else "h"
        self.length = "l!" if by_position else "l"
        self.keys = keys if takes_mask(call) else "s!"
        self.query = ["b", self.head, self.length, "_"]
        self.key = ["b", self.shared_head, self.keys, "_"]

    def mask(self, info: TensorInfo, call: Call) -> list[str]:
        """A mask broadcasts against the scores (batch, heads, queries, keys)."""
        query, key = call.arg("query").shape, call.arg("key").shape
        scores = ["b", self.head, self.length, self.keys]
        sizes = (query[0], query[1], query[2], key[2])
        skipped = 4 - len(info.shape)
        return [
            item if size == full else "_"
            for item, size, full in zip(scores[skipped:], info.shape, sizes[skipped:], strict=True)
        ]


def is_grouped(call: Call) -> bool:
    """Whether several heads of queries share one of keys."""
    heads, shared = (call.arg(name).shape[1] for name in ("query", "key"))
    return bool(shared) and heads != shared


def takes_mask(call: Call) -> bool:
    """Whether the kernel takes a mask of any shape, so that it can be told who sees whom."""
    return "for_cpu" in call.op._schema.name


def at_positions(op: Op, held: Mapping[str, Held], *args: Any, **kwargs: Any) -> Any:
    """A causal call on some of the queries and keys: with the mask that their positions give."""
    given = by_name(op, args, kwargs)
    given["is_causal"], given["attn_mask"] = False, causal_mask(held["l"], held["s"], given["query"])
    return op(**given)


def causal_mask(queries: Held, keys: Held, like: Tensor) -> Tensor:
    """Zero where a query sees a key, which is not later than it, else -inf:  [queries, keys]."""
    rows, columns = (held.positions(like.device) for held in (queries, keys))
    hidden = rows[:, None] < columns[None, :]
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)


def _local(call: Call) -> dict[str, Any]:
    """The local form, where positions matter."""
    if call.arg("is_causal") and takes_mask(call):
        return {"local": at_positions, "held": ("l", "s")}
    return {}


def with_own_keys(op: Op, held: Mapping[str, Held], *args: Any, **kwargs: Any) -> Any:
    """A call on some heads of queries: with the heads of keys and values that they share."""
    given = by_name(op, args, kwargs)
    own = _shared_heads(held["h"], given["key"])
    given["key"], given["value"] = given["key"][:, own], given["value"][:, own]
    return op(**given)


def gradients_of_own_keys(
    op: Op, held: Mapping[str, Held], *args: Any, **kwargs: Any
) -> tuple[Tensor | None, ...]:
    """The backward of `with_own_keys`: what no query of this rank shares has a gradient of zeros."""
    given = by_name(op, args, kwargs)
    whole, own = given["key"], _shared_heads(held["h"], given["key"])
    given["key"], given["value"] = given["key"][:, own], given["value"][:, own]
    of_query, of_key, of_value, *rest = op(**given)
    index = torch.arange(whole.shape[1], device=whole.device)[own]
    spread = (
        None if g is None else g.new_zeros(g.shape[0], whole.shape[1], *g.shape[2:]).index_add_(1, index, g)
        for g in (of_key, of_value)
    )
    return of_query, *spread, *rest


def _shared_heads(queries: Held, key: Tensor) -> slice | Tensor:
    """The heads of keys that these queries share: once each where equally many share each, else for each."""
    shared = queries.positions() // (queries.size // key.shape[1])
    heads, counts = torch.unique_consecutive(shared, return_counts=True)
    first, last = int(heads[0]), int(heads[-1])
    in_order = len(heads) == last - first + 1 and bool((heads.diff() == 1).all())
    if in_order and bool((counts == counts[0]).all()):
        return slice(first, last + 1)
    return shared.to(key.device)


@register_rule(*ATTENTION)
def attention(call: Call) -> Formula | None:
    """Linear in the values. The log of the sums depends on queries and keys alone."""
    if call.arg("dropout_p"):  # the mask is drawn inside the kernel, for the heads that it sees
        return None
    return _forward(call, _Labels(call), _local(call))


@register_rule(*ATTENTION)
def attention_of_any_heads(call: Call) -> Formula | None:
    """Grouped heads, cut anywhere: the keys and values of all are whole."""
    if call.arg("dropout_p") or not is_grouped(call):
        return None
    return _forward(call, _Labels(call, any_heads=True), {"local": with_own_keys, "held": ("h",)})


def _forward(call: Call, labels: _Labels, local: Mapping[str, Any]) -> Formula:
    operands = [labels.query, labels.key, labels.key]
    for name in ("attn_bias", "attn_mask"):
        info = call.bound.get(name)
        if name in call.bound:
            operands.append(labels.mask(info, call) if isinstance(info, TensorInfo) else ["-"])
    results = [labels.query, *(_statistic(info, call, labels) for info in call.results[1:])]
    return formula(join(operands, results), hom="value: sum->sum", depends={1: ("query", "key")}, **local)


def _statistic(info: TensorInfo | None, call: Call, labels: _Labels) -> list[str]:
    """Log-sum-exp stands on batch and heads (and queries, unless padded); random state on nothing."""
    query = call.arg("query").shape
    if info is None or len(info.shape) < 3 or info.shape[:2] != query[:2]:
        return ["-"]
    length = labels.length if info.shape[2] == query[2] else "_"
    return ["b", labels.head, length, *["_"] * (len(info.shape) - 3)]


@register_rule(*(f"{name}_backward" for name in ATTENTION))
def attention_backward(call: Call) -> Formula | None:
    """Linear in the gradient; cut queries or keys give every rank a term of the gradients of the others."""
    if call.arg("dropout_p"):
        return None
    return _backward(call, _Labels(call, keys="s"), _local(call))


@register_rule(*(f"{name}_backward" for name in ATTENTION))
def attention_of_any_heads_backward(call: Call) -> Formula | None:
    """The gradients of shared keys and values are sums over the queries that share them."""
    if call.arg("dropout_p") or not is_grouped(call):
        return None
    local = {"local": gradients_of_own_keys, "held": ("h",)}
    return _backward(call, _Labels(call, any_heads=True), local)


def _backward(call: Call, labels: _Labels, local: Mapping[str, Any]) -> Formula:
    operands: list[list[str]] = []
    for parameter in call.op._schema.arguments:
        value = call.bound[parameter.name]
        if "Tensor" in str(parameter.type):
            operands.append(_backward_items(parameter.name, value, call, labels))
    results = [labels.query, labels.key, labels.key]
    results += [
        labels.mask(info, call) if info is not None and len(info.shape) <= 4 else ["-"]
        for info in call.results[3:]
    ]
    fact = f"{call.op._schema.arguments[0].name}: sum->sum"
    reduce = ("sum" if labels.keys == "s" else None, "sum", "sum", "sum")
    return formula(join(operands, results), reduce=reduce, hom=fact, **local)


def _backward_items(name: str, value: object, call: Call, labels: _Labels) -> list[str]:
    if not isinstance(value, TensorInfo):
        return ["-"]
    if name in {"key", "value"}:
        return labels.key
    if name in {"attn_bias", "attn_mask"}:
        return labels.mask(value, call) if len(value.shape) in {1, 2, 3, 4} else ["-"]
    if name in {"query", "out"} or name.startswith("grad"):
        return labels.query
    return _statistic(value, call, labels)

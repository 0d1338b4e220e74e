"""Attention of some queries to some keys on one rank: the result, the log of the sums, and the gradients.

torch's CPU kernel gives the log of the sums; where it does not apply (values of another width than keys,
other devices) the same is written in products of matrices, which hold all scores at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


# Beside scores so far from 0 (of a query that a mask hides from all keys by a large number) the log of a
# number of keys is rounded away: maximum and sum are kept apart then.
_FAR = -1000.0


class Seen(NamedTuple):
    """Who sees whom, and how much a score counts.

    mask: bool (True: seen) or added to the scores, [b or 1, h or 1, l or 1, s or 1]; None: all see all.
    causal: query i sees the keys 0 .. i. scale: of the scores.
    """

    mask: Tensor | None
    causal: bool
    scale: float


class Part(NamedTuple):
    """What some queries find in some keys.

    In memory of its own.
    out: [b, h, l, v], zero for a query that sees no key. top, total: [b, h, l]; the weights of these keys add
    up to exp(top) * total, or exp(top) where there is no total; top is -inf where there are none.
    all_see: there is no such query.
    """

    out: Tensor
    top: Tensor
    total: Tensor | None
    all_see: bool


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Seen) -> Part:
    """[b, h, l, d], [b, k, s, d], [b, k, s, v] -> [b, h, l, v] and the weights [b, h, l]; k divides h.

    Rows are in one piece (`in_rows`), here as for the gradients.
    """
    if not _has_kernel(query, value):
        return _written_out(query, key, value, seen)
    mask = _added(seen.mask, query)
    out, logs = _forward(query, key, value, 0.0, seen.causal, attn_mask=mask, scale=seen.scale)
    logs = without_numbers(out, logs, query, key)
    if mask is not None:
        if (logs < _FAR).any():
            return _written_out(query, key, value, seen)
        logs = logs.masked_fill((mask == -torch.inf).all(-1), -torch.inf)  # the kernel says 0
    return Part(out, logs, None, mask is None)


def without_numbers(out: Tensor, logs: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The logs of a result, nan for a query all of whose scores are, as beside other keys the sum is.

    The kernel takes it for one that sees no key, and says 0. It does so for a query that is nan itself, too,
    whatever the keys are: that stays.
    """
    none = logs == 0
    if not none.any() or key.isfinite().all():
        return logs
    return logs.masked_fill(none & (out == 0).all(-1) & query.isfinite().all(-1), torch.nan)


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, done: tuple[Tensor, Tensor], seen: Seen
) -> tuple[Tensor, Tensor, Tensor]:
    """The terms of the gradients of queries, keys and values that these keys make.

    Args: grad: of the finished result. done: the finished result and logs, over all keys there are; see
        `finite`.
    """
    out, logs = done
    if not _has_kernel(query, value):
        return _written_out_backward(grad, query, key, value, done, seen)
    given = (grad, query, key, value, out, _as_the_kernel_has_them(logs))
    mask = _added(seen.mask, query)
    made: tuple[Tensor, Tensor, Tensor] = _backward(
        *given, 0.0, seen.causal, attn_mask=mask, scale=seen.scale
    )
    return made


def in_rows(x: Tensor) -> Tensor:
    """With rows in one piece, as the kernel takes them to be: a part may lie otherwise than its whole."""
    return x if x.stride(-1) == 1 else x.contiguous()


def piece(x: Tensor, span: slice) -> Tensor:
    """Some neighbouring positions:  [b, h, l, ...] -> [b, h, span, ...], a view; itself if these are all."""
    length = span.stop - span.start
    return x if length == x.shape[2] else x.narrow(2, span.start, length)


def finite(logs: Tensor) -> Tensor:
    """As gradients need them: a query that sees no key has weights of 0, whatever stands here."""
    return logs.masked_fill(logs == -torch.inf, 0.0)


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def _as_the_kernel_has_them(logs: Tensor) -> Tensor:
    """The kernel keeps the logs of a query's heads side by side, and reads them so."""
    made: Tensor = logs.transpose(1, 2).contiguous().transpose(1, 2)
    return made


def _added(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask as it is added to the scores."""
    if mask is None:
        return None
    if mask.dtype is not torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(~mask, -torch.inf)


def _scores(query: Tensor, key: Tensor, seen: Seen) -> Tensor:
    """[b, h, l, d], [b, k, s, d] -> [b, k, h / k, l, s], in float32 at least, -inf where not seen."""
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.unflatten(1, (key.shape[1], -1)).to(wide)
    scores: Tensor = grouped @ key.unsqueeze(2).to(wide).transpose(-1, -2) * seen.scale
    mask = _added(seen.mask, scores)
    if mask is not None:
        scores = scores + (mask.unflatten(1, (key.shape[1], -1)) if mask.shape[1] > 1 else mask.unsqueeze(2))
    if seen.causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _written_out(query: Tensor, key: Tensor, value: Tensor, seen: Seen) -> Part:
    scores = _scores(query, key, seen)
    top = scores.amax(-1)
    weights = (scores - top.masked_fill(top == -torch.inf, 0.0)[..., None]).exp()
    total = weights.sum(-1)
    out = weights @ value.unsqueeze(2).to(weights.dtype) / total.masked_fill(total == 0, 1.0)[..., None]
    return Part(out.flatten(1, 2).to(query.dtype), top.flatten(1, 2), total.flatten(1, 2), all_see=False)


def _written_out_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, done: tuple[Tensor, Tensor], seen: Seen
) -> tuple[Tensor, Tensor, Tensor]:
    scores = _scores(query, key, seen)
    wide, groups = scores.dtype, (key.shape[1], -1)
    rows, result, whole = (x.to(wide).unflatten(1, groups) for x in (grad, done[0], query))
    weights = (scores - done[1].to(wide).unflatten(1, groups)[..., None]).exp()
    of_weights = rows @ value.unsqueeze(2).to(wide).transpose(-1, -2)
    of_scores = weights * (of_weights - (rows * result).sum(-1, keepdim=True)) * seen.scale
    of_query = (of_scores @ key.unsqueeze(2).to(wide)).flatten(1, 2)
    of_key = (of_scores.transpose(-1, -2) @ whole).sum(2)
    of_value = (weights.transpose(-1, -2) @ rows).sum(2)
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)

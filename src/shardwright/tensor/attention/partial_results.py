"""Results of attention to parts of the keys, merged by the logs of their sums (the online softmax).

Source: Milakov, Gimelshein, arXiv 1805.02867, section 3; Liu, Zaharia, Abbeel, "Ring Attention with Blockwise
Transformers", arXiv 2310.01889, section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.tensor.attention.kernel import Part, piece


class Merged:
    """The attention of some queries to all the keys that they were shown so far.

    Results that know the logs of their sums are merged finished. Where one has its sums apart, so have all
    from then on, and are finished at the end.
    """

    def __init__(self, query: Tensor, width: int) -> None:
        wide = torch.promote_types(query.dtype, torch.float32)
        shape = query.shape[:3]
        self._dtype = query.dtype
        # As the queries lie in memory, where the result is as wide: so one device's kernel has it.
        alike = width == query.shape[3]
        self._out = (  # written by what comes first
            torch.empty_like(query, dtype=wide) if alike else query.new_empty((*shape, width), dtype=wide)
        )
        self._top = query.new_full(shape, -torch.inf, dtype=wide)
        self._total: Tensor | None = None
        self._empty = True

    def add(self, queries: slice, part: Part) -> None:
        """Merge what some of the queries found in further keys."""
        if self._empty and part.total is None and queries == slice(0, self._top.shape[2]):
            self._begin(part)
            return
        self._written()
        if part.total is None and self._total is None:
            self._merge_finished(queries, part)
        else:
            self._merge_sums(queries, part)

    def _written(self) -> None:
        if self._empty:
            self._out.zero_()
        self._empty = False

    def _begin(self, part: Part) -> None:
        """Take what all of the queries found first, with its memory if it lies there as the result will."""
        self._empty = False
        self._top = part.top.to(self._top.dtype)
        if part.out.dtype == self._out.dtype and part.out.stride() == self._out.stride():
            self._out = part.out
        else:
            self._out.copy_(part.out)

    def _merge_finished(self, queries: slice, part: Part) -> None:
        top = piece(self._top, queries)
        both = torch.logaddexp(top, part.top)
        shift = both if part.all_see else both.masked_fill(both == -torch.inf, 0.0)
        self._weigh(queries, (top - shift).exp_(), part.out, (part.top - shift).exp_())
        top.copy_(both)

    def _merge_sums(self, queries: slice, part: Part) -> None:
        self._total = torch.ones_like(self._top) if self._total is None else self._total
        total, top = piece(self._total, queries), piece(self._top, queries)
        highest = torch.maximum(top, part.top)
        shift = highest.masked_fill(highest == -torch.inf, 0.0)
        kept, weight = (top - shift).exp(), (part.top - shift).exp()
        weight = weight if part.total is None else weight * part.total
        self._weigh(queries, kept, part.out, weight)
        total.mul_(kept).add_(weight)
        top.copy_(highest)

    def _weigh(self, queries: slice, kept: Tensor, out: Tensor, weight: Tensor) -> None:
        own = piece(self._out, queries)
        own.mul_(kept[..., None]).addcmul_(out.to(own.dtype), weight[..., None])

    def finished(self) -> tuple[Tensor, Tensor]:
        """[b, h, l, v] in the dtype of the queries; the logs of the sums [b, h, l], -inf for no key."""
        self._written()
        if self._total is None:
            return self._out.to(self._dtype), self._top
        sees = self._total != 0
        out = self._out / self._total.masked_fill(~sees, 1.0)[..., None]
        logs = torch.where(sees, self._top + self._total.log(), -torch.inf)
        return out.to(self._dtype), logs

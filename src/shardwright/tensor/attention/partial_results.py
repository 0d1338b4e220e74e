"""Results of attention to parts of the keys, merged by the logs of their sums (the online softmax).

Source: Milakov, Gimelshein, arXiv 1805.02867, section 3; Liu, Zaharia, Abbeel, "Ring Attention with Blockwise
Transformers", arXiv 2310.01889, section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from shardwright.tensor.attention.kernel import Part


class Merged:
    """The attention of some queries to all the keys that they were shown so far."""

    def __init__(self, query: Tensor, width: int) -> None:
        wide = torch.promote_types(query.dtype, torch.float32)
        shape = query.shape[:3]
        self._dtype = query.dtype
        # As the queries lie in memory, where the result is as wide: so one device's kernel has it.
        alike = width == query.shape[3]
        self._sum = (
            torch.zeros_like(query, dtype=wide) if alike else query.new_zeros((*shape, width), dtype=wide)
        )
        self._top = query.new_full(shape, -torch.inf, dtype=wide)
        self._total = query.new_zeros(shape, dtype=wide)
        self._empty = True

    def add(self, queries: slice, part: Part) -> None:
        """Merge what some of the queries found in further keys."""
        if self._empty and queries == slice(0, self._top.shape[2]):
            self._sum.copy_(part.out).mul_(part.total[..., None])
            self._top.copy_(part.top)
            self._total.copy_(part.total)
            self._empty = False
            return
        self._empty = False
        total, top = self._total[:, :, queries], self._top[:, :, queries]
        highest = torch.maximum(top, part.top)
        shift = highest.masked_fill(highest == -torch.inf, 0.0)
        kept, weight = (top - shift).exp(), (part.top - shift).exp() * part.total
        self._sum[:, :, queries].mul_(kept[..., None]).addcmul_(part.out.to(total.dtype), weight[..., None])
        total.mul_(kept).add_(weight)
        top.copy_(highest)

    def finished(self) -> tuple[Tensor, Tensor]:
        """[b, h, l, v] in the dtype of the queries; the logs of the sums [b, h, l], -inf for no key."""
        sees = self._total != 0
        out = self._sum / self._total.masked_fill(~sees, 1.0)[..., None]
        logs = torch.where(sees, self._top + self._total.log(), -torch.inf)
        return out.to(self._dtype), logs

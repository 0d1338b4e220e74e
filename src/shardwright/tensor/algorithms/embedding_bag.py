"""`embedding_bag` of cut operands: the rows that are looked up, then the sum, mean or maximum of each bag.

torch's kernel takes flat indices and the offsets of the bags, and what it returns besides has no shape of its
own: as an op it would gather tables and indices. Look-ups and sums have rules: rows that are cut stay where
they are and leave a sum pending, bags and columns that are cut are computed where they are.
Cost: what its steps send; rows of all looked-up indices in memory, as long as the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.compat import modes_on
from shardwright.rules.call import Args
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.plain.boundary import Own
from shardwright.tensor.wrap import as_replicated


@dataclass(frozen=True)
class _Bags:
    """The arguments of a call, by torch's names."""

    input: Any
    weight: Any
    offsets: Any = None
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    mode: str = "mean"
    sparse: bool = False
    per_sample_weights: Any = None
    include_last_offset: bool = False
    padding_idx: int | None = None

    @property
    def takes_steps(self) -> bool:
        """Is an operand cut, of a call that these steps say all of? What is wrong about others torch says."""
        operands = [self.input, self.weight, self.offsets, self.per_sample_weights]
        given = [x for x in operands if x is not None]
        if not all(isinstance(x, DTensor) and x.device_mesh == self.weight.device_mesh for x in given):
            return False
        placements = [p for x in given for p in x._spec.layout.placements]
        if not any(p.is_partition or p.is_pending for p in placements) or self.weight.dim() != 2:
            return False
        if not self._dtypes_are_taken():
            return False
        weighted = self.per_sample_weights is not None
        if self.max_norm is not None or self.sparse or self.scale_grad_by_freq:
            return False
        if weighted and (self.mode != "sum" or self.per_sample_weights.shape != self.input.shape):
            return False
        if self.offsets is None:
            return self.input.dim() == 2 and self.input.shape[1] > 0 and self.mode in _MODES
        fits = self.input.dim() == self.offsets.dim() == 1 and self.offsets.numel() > self.include_last_offset
        return fits and self.mode in ("sum", "mean") and self._ends_meet()

    def _dtypes_are_taken(self) -> bool:
        weights = self.per_sample_weights
        same = weights is None or weights.dtype == self.weight.dtype
        of_rows = [x.dtype for x in (self.input, self.offsets) if x is not None]
        return same and self.weight.is_floating_point() and {*of_rows} <= {torch.int32, torch.int64}

    def _ends_meet(self) -> bool:
        """Is every index in a bag? Kernels differ where one is in none. Not where no value can be read."""
        if modes_on() or self.offsets.is_meta:
            return False
        ends = (self.offsets[-1] == self.input.numel()) if self.include_last_offset else True
        return bool((self.offsets[0] == 0) & ends)

    def kept(self) -> Tensor | None:
        """Which indices count:  i64[...] -> bool[..., 1]; None: all."""
        if self.padding_idx is None:
            return None
        there: Tensor = self.input != self.padding_idx % self.weight.shape[0]
        return there.unsqueeze(-1)

    def rows(self, kept: Tensor | None, none: float) -> Tensor:
        """The rows that are looked up, times their weights:  [...] -> [..., e]; `none` where none counts."""
        rows: Tensor = functional.embedding(self.input, self.weight, self.padding_idx)
        if self.per_sample_weights is not None:
            rows = rows * self.per_sample_weights.unsqueeze(-1)
        return rows if kept is None else rows.masked_fill(~kept, none)


_MODES = ("sum", "mean", "max")


def bags(func: Callable[..., Any], args: Args, kwargs: dict[str, Any]) -> Any:
    """`torch.nn.functional.embedding_bag` where a DTensor is among the operands:  [b, n] or [n] -> [b, e].

    Cost: see above; offsets that are cut, and are read, 8 bytes to each rank.
    """
    call = _Bags(*args, **kwargs)
    if not call.takes_steps:
        return func(*args, **kwargs)
    return _of_one_length(call) if call.offsets is None else _of_offsets(call)


def _of_one_length(call: _Bags) -> Tensor:
    kept = call.kept()
    if call.mode == "max":
        top: Tensor = call.rows(kept, -torch.inf).max(1).values
        return top if kept is None else top.masked_fill(~kept.any(1), 0.0)
    total = call.rows(kept, 0.0).sum(1)
    if call.mode == "sum":
        return total
    return total / (call.input.shape[1] if kept is None else kept.sum(1).clamp(min=1))


def _of_offsets(call: _Bags) -> Tensor:
    """Bags of any length. An offset that is the end of the last bag begins one of nothing."""
    kept, offsets, count = call.kept(), call.offsets, call.offsets.numel()
    places = torch.arange(call.input.numel(), dtype=offsets.dtype, device=offsets.device)
    mesh = call.weight.device_mesh
    bag = torch.searchsorted(offsets, as_replicated(places, mesh), right=True) - 1
    rows = call.rows(kept, 0.0)
    total = rows.new_zeros(count, rows.shape[1]).index_add(0, bag, rows)
    if call.mode == "mean":
        ones = torch.ones_like(places).unsqueeze(-1)
        counted = as_replicated(ones, mesh) if kept is None else kept.to(ones.dtype)
        total = total / counted.new_zeros(count, 1).index_add(0, bag, counted).clamp(min=1)
    return total[:-1] if call.include_last_offset else total


OWN: dict[Any, Own] = {functional.embedding_bag: bags}

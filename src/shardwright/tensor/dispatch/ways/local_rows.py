"""A program over rows on one rank's parts: plain kernels, and a redistribution per reduction of rows.

The same text runs on logical tensors (`rules.algorithms.rows`), op by op; here nothing is dispatched or
decided. It is the same where every axis cuts along one dim and all operands lie alike: what goes element by
element does so on the parts, and what a rank has of a row gives one term of what the row gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwright.compat import tree_leaves, tree_map_only
from shardwright.index.region import Shape
from shardwright.index.stride import stride_order
from shardwright.layout.layout import Layout
from shardwright.placement.base import Placement
from shardwright.placement.partial import Partial
from shardwright.remember import remembered
from shardwright.rules.algorithms.rows import Dims, Program
from shardwright.rules.call import Args, Kwargs
from shardwright.rules.described import dims_of
from shardwright.rules.identity import identity_of
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.spec import coords_of, spec_of
from shardwright.tensor.wrap import wrap


@dataclass(frozen=True, slots=True)
class LocalRows:
    """Rows of which this rank holds parts, as the layout says. finish: reduces what is pending."""

    layout: Layout
    mesh: DeviceMesh
    finish: Callable[[DTensor, str], DTensor]

    def max(self, x: torch.Tensor, dims: Dims, why: str) -> torch.Tensor:
        """See `Rows`; a rank without elements of a row has -inf of it."""
        return self._reduced(x, dims, "max", torch.amax, why)

    def sum(self, x: torch.Tensor, dims: Dims, why: str) -> torch.Tensor:
        """See `Rows`."""
        return self._reduced(x, dims, "sum", torch.sum, why)

    def _reduced(
        self, x: torch.Tensor, dims: Dims, op: str, kernel: Callable[..., torch.Tensor], why: str
    ) -> torch.Tensor:
        rows = _rows(self.layout, dims_of(dims, x.dim()), op, x.dtype)
        if x.numel():
            term = kernel(x, dims, keepdim=True)
        else:
            term = x.new_full(rows.local_shape(coords_of(self.mesh) or ()), identity_of(Partial(op), x.dtype))
        return self.finish(wrap(term, spec_of(rows, self.mesh)), why)._local_tensor


@remembered(4096)
def _rows(layout: Layout, dims: tuple[int, ...], op: str, dtype: torch.dtype) -> Layout:
    """The layout of one number per row, a term of it where an axis cuts the row."""
    placements: list[Placement] = list(layout.placements)
    for step in layout.partitions:
        (axis,) = step.axes
        if step.partition is not None and step.partition.cut_dims(layout.shape, step.size)[0] in dims:
            placements[axis] = Partial(op)
    shape = tuple(1 if dim in dims else size for dim, size in enumerate(layout.shape))
    return Layout(layout.mesh_shape, placements, shape, dtype=dtype, order=layout.order_names)


def run_on_parts(
    program: Program, args: Args, kwargs: Kwargs, finish: Callable[[DTensor, str], DTensor]
) -> Any:
    """The program's results as DTensors; NotImplemented where the parts do not tell them.

    Args: finish: how a DTensor with pending axes is finished.
    """
    tensors = [x for x in tree_leaves((args, dict(kwargs))) if isinstance(x, torch.Tensor)]
    first = tensors[0]
    if not isinstance(first, DTensor) or first._spec.coords is None:
        return NotImplemented
    layout, mesh = first._spec.layout, first.device_mesh
    order = _order_in_memory(layout)
    if order is None or not all(_lies_alike(x, first, order) for x in tensors):
        return NotImplemented
    rows = LocalRows(layout, mesh, finish)
    args, kwargs = tree_map_only(DTensor, lambda x: x._local_tensor, (args, dict(kwargs)))
    out = program(rows, *args, **kwargs)
    return tree_map_only(torch.Tensor, lambda x: wrap(x, spec_of(_dense(layout, x.dtype), mesh)), out)


def _order_in_memory(layout: Layout) -> Shape | None:
    """The dims from the outermost in memory to the innermost; None: not every axis cuts along one dim, ..."""
    if not layout.by_runs or layout.pending_axes or any(len(step.axes) > 1 for step in layout.partitions):
        return None
    return stride_order(layout.shape, layout.stride)


def _lies_alike(x: torch.Tensor, first: DTensor, order: Shape) -> bool:
    if not isinstance(x, DTensor) or x._spec.use is not None or x._spec.mesh != first._spec.mesh:
        return False
    mine, theirs = x._spec.layout, first._spec.layout
    same = mine.placements == theirs.placements and mine.order == theirs.order and mine.shape == theirs.shape
    return same and _order_in_memory(mine) == order


@remembered(4096)
def _dense(layout: Layout, dtype: torch.dtype) -> Layout:
    return layout.with_shape(layout.shape, layout.stride, dtype=dtype)

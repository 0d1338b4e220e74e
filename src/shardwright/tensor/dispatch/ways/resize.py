"""`resize_`: another size for the same tensor object; on one device it keeps the elements that fit.

Cost: a gather where there are elements to keep: they fill the new size in logical order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwright.layout.layout import Layout
from shardwright.placement.base import Replicate
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.tensor.distribute import own_part
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.move import whole_unasked
from shardwright.tensor.spec import spec_of
from shardwright.tensor.views import write_back
from shardwright.tensor.wrap import as_it_was, offset_of, wrap


def resize(func: Op, args: Args, kwargs: Kwargs) -> DTensor:
    """`x.resize_(size)`: its placements stay where the number of dims does, else it is replicated."""
    return _resized(func, args[0], args[1], kwargs)


def resize_as(func: Op, args: Args, kwargs: Kwargs) -> DTensor:
    """`x.resize_as_(other)`: the size of the other."""
    return _resized(func, args[0], tuple(args[1].shape), kwargs)


def _resized(func: Op, x: DTensor, size: Sequence[int], kwargs: Kwargs) -> DTensor:
    if tuple(x.shape) == tuple(size):
        return x
    whole = whole_unasked(func.name(), x, "the elements of a resized tensor keep their order")
    whole = whole.detach().clone().resize_(size, **kwargs)
    kept = x.dim() == len(size)
    placements = tuple(p if kept and not p.is_pending else Replicate() for p in x._spec.layout.placements)
    order = x._spec.layout.order_names if kept else None
    layout = Layout(
        x.device_mesh, placements, tuple(size), dtype=x.dtype, stride=tuple(whole.stride()), order=order
    )
    coords = x._spec.coords
    local = whole.new_empty(0) if coords is None else own_part(whole, layout, coords)
    made = wrap(local, spec_of(layout, x.device_mesh, x._spec.use), offset=offset_of(x))
    write_back.stand_in(as_it_was(x), x)  # in memory of its own from here on
    x.data = made  # what torch knows of sizes and strides
    x._local_tensor, x._spec = made._local_tensor, made._spec
    return x


RESIZES = {torch.ops.aten.resize_.default: resize, torch.ops.aten.resize_as_.default: resize_as}

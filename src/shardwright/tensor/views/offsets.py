"""Where a view begins in memory: as on one device, whichever way its elements came to be where they are.

torch's composites (`fill_diagonal_`, ...), its autograd and its users read a view's storage offset and count
places from there. Every op that returns views passes here, so that no way of running one can forget it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwright.compat import (
    DisableTorchFunctionSubclass,
    TensorMeta,
    is_composite,
    tree_leaves,
    tree_map_only,
    without_modes,
)
from shardwright.remember import remembered
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.rules.op import is_view
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.graph_spec import GraphSpec
from shardwright.tensor.spec import Spec
from shardwright.tensor.views import write_back
from shardwright.tensor.wrap import offset_of, wrap

Call = Callable[[Op, tuple[Any, ...], Mapping[str, Any]], Any]

# Views that begin where what they view begins: nothing has to be asked.
_BEGIN_THERE = frozenset(
    f"aten::{name}"
    for name in (
        "_conj", "_neg_view", "_unsafe_view", "alias", "detach", "expand", "permute", "squeeze", "t",
        "transpose", "unfold", "unsqueeze", "view",
    )
)  # fmt: skip


# Copies of all of a storage, that begin in it where their operand does.
OF_ALL_MEMORY = frozenset({"aten::diagonal_scatter", "aten::select_scatter", "aten::slice_scatter"})


def begins_there(func: Op) -> bool | None:
    """Do the op's results begin in memory exactly where its first argument does?

    None: where they begin does not follow from where that does; or it is a view as another tensor says
    (`expand_as`), which is taken apart into views that pass here themselves.
    """
    name = func._schema.name
    if name in OF_ALL_MEMORY:
        return True
    if not is_view(func):
        return None
    if name in _BEGIN_THERE:
        return func._schema.overload_name != "dtype"
    kinds = [argument.type.kind() for argument in func._schema.arguments]
    return None if kinds.count("TensorType") > 1 else False


def as_on_one_device(route: Call, there: bool, func: Op, args: Args, kwargs: Kwargs) -> Any:
    """The views, each at the storage offset that it has on one device; `there`: `begins_there`.

    Of inference mode where their base is, ordinary where it is not, whatever the mode is now. What may be a
    view or a copy (`to`, `reshape`) consists of ops that are one or the other.
    """
    base = args[0]
    with DisableTorchFunctionSubclass():
        begin, lasting = base.storage_offset(), base.is_inference()
    if torch.is_inference_mode_enabled() != lasting and is_view(func) and not is_composite(func):
        with torch.inference_mode(lasting), torch.no_grad():
            return as_on_one_device(route, there, func, args, kwargs)
    out = route(func, args, kwargs)
    if not there and isinstance(base._spec, GraphSpec) and is_composite(func):
        return out
    if there:
        return out if not begin else _placed(out, begin, base)
    begins = _of_numbers(func, base._spec, begin, args[1:], kwargs)
    if isinstance(out, list | tuple):
        return type(out)(_placed(x, at, base) for x, at in zip(out, begins, strict=True))
    return _placed(out, begins[0], base)


def from_the_start(func: Op, args: Args, kwargs: Kwargs) -> tuple[int, ...] | None:
    """The offsets of the results where the operand has none; None: always those of the operand."""
    if begins_there(func):
        return None
    return _of_numbers(func, args[0]._spec, 0, args[1:], kwargs)


def _of_numbers(func: Op, base: Spec, offset: int, rest: Args, named: Kwargs) -> tuple[int, ...]:
    """As `_offsets`; of symbols of a graph, for the numbers that it holds for from here on."""
    if isinstance(base, GraphSpec):
        base = base.fix()
        offset, rest, named = tree_map_only(torch.SymInt, int, (offset, rest, dict(named)))
    keywords = _frozen(tuple(named.items())) if named else ()
    return _offsets(func, base.tensor_meta, offset, _frozen(rest), keywords)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _placed(out: Any, offset: int, base: torch.Tensor) -> Any:
    """The same view, at this offset: a wrapper's is fixed when it is made."""
    if not isinstance(out, DTensor) or out is base or offset_of(out) == offset:
        return out
    made = wrap(out._local_tensor, out._spec, offset=offset)
    write_back.replace(out, made)
    return made


@remembered(16384)
def _offsets(func: Op, base: TensorMeta, offset: int, rest: tuple[Any, ...], named: Any) -> tuple[int, ...]:
    """The offsets of the views of a tensor like this, at this offset, as torch has it."""
    with without_modes(), torch.no_grad():
        held = torch.empty(0, dtype=base.dtype, device="meta").as_strided(base.shape, base.stride, offset)
        rest, named = tree_map_only(torch.device, lambda _: held.device, (rest, dict(named)))
        return tuple(x.storage_offset() for x in tree_leaves(func(held, *rest, **named)))

"""Dtypes and shapes that a kernel refuses are refused by all ranks, before anything is sent.

torch's functions for tensors without data take many calls that their kernels refuse (`linear` of float32 and
float64, `grid_sample` of integers; `sort` along a dim that is not there). A rank whose part is empty never
asks the kernel, or asks it about less: it would wait for the others, who have raised.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch

from shardwright.compat import WithoutTangents, tree_map_only, without_modes
from shardwright.layout.layout import all_hold_some
from shardwright.remember import memo, remembered
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.tensor.dtensor import DTensor

_ALWAYS_TAKEN = ({torch.float32}, {torch.float64})  # by whatever took them without data, on their own
_LARGEST = 1 << 17  # elements of an operand; parts of larger ones are hardly ever empty
_ABOUT_DTYPES = re.compile(r"type|not implemented for|must be long|bool|Float|Double|Long|Half|Complex")
# Operands that kernels take as numbers, or as indices whose bounds they check: zeros are good ones. Pivots,
# offsets and lengths are trusted instead, and what is saved for a backward too.
_HARMLESS = frozenset({
    "A", "B", "batch1", "batch2", "bias", "boundaries", "condition", "end", "exponent", "grid", "high",
    "imag", "index", "indices", "input", "low", "mask", "mat", "mat1", "mat2", "max", "min", "n", "other",
    "out", "pos_weight", "real", "running_mean", "running_var", "self", "sorted_sequence", "sorter", "source",
    "src", "start", "target", "tensor", "tensor1", "tensor2", "tensors", "value", "values", "vec", "vec1",
    "vec2", "weight", "x", "x1", "x2",
})  # fmt: skip
_taken: dict[tuple[Any, ...], bool] = memo("dtypes that kernels take", {})


def refuse_alike(func: Op, args: Args, kwargs: Kwargs, tensors: list[DTensor]) -> None:
    """Raise what one device raises for operands of these dtypes and, if a rank has none of one, these shapes.

    Args: tensors: those among the arguments.
    Asks the op's own kernel, with zeros of the logical shapes, until it has taken these dtypes once; and with
    other values, which may be no reason.
    """
    traced = torch.compiler.is_compiling()  # one trace for all
    all_have_some, dtypes = True, []
    for x in tensors:
        dtypes.append(x.dtype)
        all_have_some = all_have_some and (traced or all_hold_some(x._spec.layout))
    if (all_have_some and set(dtypes) in _ALWAYS_TAKEN) or not _may_be_asked(func):
        return
    key = (func, tensors[0].device.type, *dtypes)
    if (all_have_some and key in _taken) or _largest(tensors, traced=traced) > _LARGEST:
        return
    error = _raised(func, args, kwargs, torch.zeros)
    if error is None:
        _taken[key] = True
        return
    other = error if _ABOUT_DTYPES.search(str(error)) else None
    if not (all_have_some or other):
        other = _raised(func, args, kwargs, torch.ones)
    if type(other) is type(error) and str(other) == str(error):
        try:
            raise error
        finally:  # its traceback knows this frame: operands would live until the collector comes
            del error, other


def _largest(tensors: list[DTensor], *, traced: bool) -> int:
    return max(x._spec.shown.layout.numel if traced else x.numel() for x in tensors)


def said_by_kernel(func: Op, args: Args, kwargs: Kwargs, tensors: list[DTensor]) -> Exception | None:
    """What the op's own kernel says to zeros of these shapes and dtypes, if it refuses them."""
    small = all(x.numel() <= _LARGEST for x in tensors)
    return _raised(func, args, kwargs, torch.zeros) if small and _may_be_asked(func) else None


def _raised(func: Op, args: Args, kwargs: Kwargs, values: Callable[..., torch.Tensor]) -> Exception | None:
    """What the kernel says to operands of these values."""
    given, named = tree_map_only(
        DTensor,
        lambda x: values(x._spec.shown.layout.shape, dtype=x.dtype, device=x.device),
        (args, dict(kwargs)),
    )
    try:
        with warnings.catch_warnings(), without_modes(), torch.no_grad(), WithoutTangents():
            warnings.simplefilter("ignore")
            func(*given, **named)
    except torch.linalg.LinAlgError:  # of the values: there is no inverse of zeros
        return None
    except (RuntimeError, TypeError, IndexError, ValueError) as error:  # the caller tells reasons apart
        return error.with_traceback(None)  # which knows these operands
    return None


@remembered(4096)
def _may_be_asked(func: Op) -> bool:
    """Whether the kernel is torch's own, safe with zeros, and leaves no trace."""
    names = {a.name for a in func._schema.arguments if "Tensor" in str(a.type)}
    computes = func.namespace == "aten" and "backward" not in func._schema.name
    return computes and names <= _HARMLESS and torch.Tag.nondeterministic_seeded not in func.tags

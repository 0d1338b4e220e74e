"""Dtypes that a kernel refuses are refused by all ranks, before anything is sent.

torch's functions for tensors without data take many calls that their kernels refuse (`linear` of float32 and
float64, `grid_sample` of integers). A rank whose part is empty never asks the kernel: it would wait for the
others, who have raised.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch

from shardwright.compat import WithoutTangents, tree_map_only, without_modes
from shardwright.remember import memo, remembered
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.tensor.dtensor import DTensor

_ALWAYS_TAKEN = ({torch.float32}, {torch.float64})  # by whatever took them without data, on their own
_LARGEST = 1 << 17  # elements of an operand; parts of larger ones are hardly ever empty
_ABOUT_DTYPES = re.compile(r"type|not implemented for|must be long|Float|Double|Long|Half|Complex")
# Operands that kernels take as numbers, or as indices whose bounds they check: zeros are good ones. Pivots,
# offsets and lengths are trusted instead, and what is saved for a backward too.
_HARMLESS = frozenset({
    "A", "B", "batch1", "batch2", "bias", "condition", "end", "exponent", "grid", "high", "index", "indices",
    "input", "low", "mask", "mat", "mat1", "mat2", "max", "min", "other", "out", "pos_weight", "running_mean",
    "running_var", "self", "source", "src", "start", "target", "tensor1", "tensor2", "tensors", "value",
    "values", "vec", "vec1", "vec2", "weight", "x", "x1", "x2",
})  # fmt: skip
_taken: dict[tuple[Any, ...], bool] = memo("dtypes that kernels take", {})


def refuse_dtypes(func: Op, args: Args, kwargs: Kwargs, tensors: list[DTensor]) -> None:
    """Raise what one device raises for operands of these dtypes, if it does.

    Args: tensors: those among the arguments.
    Asks the op's own kernel, with zeros of the logical shapes, until it has taken these dtypes once.
    """
    dtypes = tuple([x.dtype for x in tensors])
    if set(dtypes) in _ALWAYS_TAKEN or not _may_be_asked(func):
        return
    key = (func, tensors[0].device.type, *dtypes)
    if key in _taken or any(x.numel() > _LARGEST for x in tensors):
        return
    zeros, named = tree_map_only(
        DTensor, lambda x: torch.zeros(x.shape, dtype=x.dtype, device=x.device), (args, dict(kwargs))
    )
    try:
        with warnings.catch_warnings(), without_modes(), torch.no_grad(), WithoutTangents():
            warnings.simplefilter("ignore")
            func(*zeros, **named)
            _taken[key] = True
    except Exception as error:  # zeros may be refused for other reasons, which are no answer
        if isinstance(error, RuntimeError | TypeError | IndexError) and _ABOUT_DTYPES.search(str(error)):
            raise


@remembered(4096)
def _may_be_asked(func: Op) -> bool:
    """Whether the kernel is torch's own, safe with zeros, and leaves no trace."""
    names = {a.name for a in func._schema.arguments if "Tensor" in str(a.type)}
    computes = func.namespace == "aten" and "backward" not in func._schema.name
    return computes and names <= _HARMLESS and torch.Tag.nondeterministic_seeded not in func.tags

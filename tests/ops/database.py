"""The operators of torch's own test database, and which of their sample inputs are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from itertools import islice
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from shardwright.testing.rank_device import here
from tests import torch_samples
from tests.ops.excluded import EXCLUDED
from tests.torch_samples import op_db

_LOOKED_AT = 80  # sample inputs of one operator and dtype among which the distinct ones are chosen
SEED = 11
Shapes = tuple[tuple[int, ...], ...]
SAMPLE, REFERENCE, REFUSED, MIXED = "sample", "reference", "refused", "mixed dtypes"
LAST, TURNED = "channels last", "turned"
SOURCES = (SAMPLE, REFERENCE, REFUSED, MIXED, LAST, TURNED)
_OTHER_DTYPES = (torch.float64, torch.int64, torch.complex64)
_OPERANDS = 4  # those of a sample that are tried in other dtypes


def operators() -> dict[str, Any]:
    """Every OpInfo that is not excluded, by its full name (`nn.functional.gelu`, `div.floor_rounding`)."""
    return {info.full_name: info for info in op_db if info.full_name not in EXCLUDED}


def dtypes_of(info: Any, wanted: tuple[torch.dtype, ...]) -> list[torch.dtype]:
    """The wanted dtypes that the operator takes here; its simplest one if it takes none of them."""
    supported = info.supported_dtypes(_device())
    chosen = [dtype for dtype in wanted if dtype in supported]
    return chosen or sorted(supported, key=lambda dtype: (dtype.itemsize, str(dtype)))[-1:]


def _device() -> str:
    """Where this process makes tensors."""
    return here().type


def seed() -> None:
    """The state from which samples, references and random operators start."""
    torch_samples.seed(SEED)


def samples_of(info: Any, dtype: torch.dtype, count: int, source: str = SAMPLE) -> list[tuple[int, Any]]:
    """Up to `count` inputs with distinct shapes, spread over what the operator offers.

    Args:
        source: the operator's samples, its inputs for comparisons with references, those that it refuses,
            or its samples with one operand after the other in other dtypes (all of `count` samples), with
            dim 1 the innermost in memory, or with the first dim innermost and so on.
    Returns: (index in the operator's own list, sample), in its order.
    """
    if source == MIXED:
        bases = [sample for _, sample in samples_of(info, dtype, count)]
        return list(enumerate(mixed for base in bases for mixed in _in_other_dtypes(base)))
    if source in _ORDERS:
        return [(i, _in_order(sample, _ORDERS[source])) for i, sample in samples_of(info, dtype, count)]
    seed()
    offered = list(islice(filter(_has_data, _offered(info, dtype, source)), _LOOKED_AT))
    return [(index, offered[index]) for index in _chosen([_shapes(sample) for sample in offered], count)]


def _offered(info: Any, dtype: torch.dtype, source: str) -> Iterator[Any]:
    grad = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    if source == SAMPLE:
        yield from info.sample_inputs(_device(), dtype, requires_grad=grad)
    elif source == REFERENCE:
        for sample in info.reference_inputs(_device(), dtype):  # some cannot be made with gradients
            if grad and isinstance(sample.input, torch.Tensor) and sample.input.dtype == dtype:
                sample.input.requires_grad_()
            yield sample
    elif info.error_inputs_func is not None:
        yield from (refused.sample_input for refused in info.error_inputs(_device()))


def _in_other_dtypes(sample: Any) -> Iterator[Any]:
    """A sample of two tensors or more with one of them in another dtype, for each and each dtype."""
    values, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    tensors = [index for index, value in enumerate(values) if isinstance(value, torch.Tensor)]
    if len(tensors) < 2:
        return
    for index in tensors[:_OPERANDS]:
        for dtype in _OTHER_DTYPES:
            if values[index].dtype != dtype:
                grad = values[index].requires_grad and dtype != torch.int64
                cast = values[index].detach().to(dtype).requires_grad_(grad)
                parts = tree_unflatten([*values[:index], cast, *values[index + 1 :]], spec)
                mixed = copy(sample)
                mixed.input, mixed.args, mixed.kwargs = parts
                yield mixed


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    """Dim 1 innermost, as in torch's memory formats."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def _turned(x: torch.Tensor) -> torch.Tensor:
    """The first dim innermost."""
    dims = tuple(reversed(range(x.dim())))
    return x.permute(dims).contiguous().permute(dims)


_ORDERS = {LAST: _channels_last, TURNED: _turned}


def _in_order(sample: Any, order: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The sample with its tensors in another order in memory."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        grad = x.requires_grad
        return order(x.detach()).requires_grad_(grad) if x.dim() > 1 and x.layout == torch.strided else x

    made = copy(sample)
    parts = tree_map_only(torch.Tensor, turned, (sample.input, sample.args, sample.kwargs))
    made.input, made.args, made.kwargs = parts
    return made


def _has_data(sample: Any) -> bool:
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    return not any(isinstance(x, torch.Tensor) and x.is_meta for x in leaves)


def _chosen(shapes: list[Shapes], count: int) -> list[int]:
    """The input with most elements, then one of each shape evenly over the list, then others."""
    first_of: dict[Shapes, int] = {}
    for index, key in enumerate(shapes):
        first_of.setdefault(key, index)
    if not shapes:
        return []
    largest = max(range(len(shapes)), key=lambda i: sum(map(prod, shapes[i])))
    distinct = [index for index in first_of.values() if shapes[index] != shapes[largest]]
    some = min(count - 1, len(distinct))
    taken = dict.fromkeys([largest, *(distinct[(i * len(distinct)) // some] for i in range(some))])
    others = [index for index in range(len(shapes)) if index not in taken]
    return sorted([*taken, *others][:count])


def _shapes(sample: Any) -> Shapes:
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    return tuple(tuple(x.shape) for x in leaves if isinstance(x, torch.Tensor))

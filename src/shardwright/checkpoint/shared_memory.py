"""Tensors that lie in one memory: they are one tensor, or a load would write one over the other."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from math import gcd, prod
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from shardwright.checkpoint.pieces import part_of
from shardwright.errors import CheckpointError
from shardwright.layout.of_tensor import layout_of
from shardwright.remember import remembered


class Span(NamedTuple):
    """Where elements lie: between two addresses of a device, `strides` elements apart.

    turned: whether they are conjugated, and negated, where they are read.
    """

    device: tuple[str, int]
    start: int
    stop: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    turned: tuple[bool, bool]


_Named = tuple[Span, str]


def memory_of(tensor: torch.Tensor, span: Span | None) -> Hashable:
    """Equal for tensors that are one: one object, or the same elements in memory, read in the same way.

    So are tensors that were tied by `one.data = other.data`, and views of one tensor that show all of it.

    Args: span: that of the tensor.
    """
    if span is None:
        return id(tensor)
    return span, layout_of(tensor) if isinstance(tensor, DTensor) else tensor.dtype  # a layout has its own


def refuse_overlaps(placed: Iterable[tuple[str, Span | None]], alike: Callable[[str, str], bool]) -> None:
    """Raises CheckpointError where to write one tensor is to write into another, or twice into itself.

    Args:
        placed: tensors by name, each with its span.
        alike: whether two tensors, by name, get the same elements; then they may be one memory.
    Cost: a sort; where tensors lie between one another's elements, a byte of memory for each of these.
    """
    spans = sorted((span, name) for name, span in placed if span is not None)
    for span, name in spans:
        if _meets_itself(span.shape, span.strides):
            raise CheckpointError(
                f"{name} has elements that share their memory (its strides are {span.strides}), and would be "
                "written over itself: clone it first"
            )
    for cluster in (one for one in _clusters(spans) if len(one) > 1):
        _refuse_marked(_without_twins(cluster, alike))


def span_of(tensor: torch.Tensor) -> Span | None:
    """Where its part on this rank lies; None of one without elements in memory."""
    local = part_of(tensor)
    if not local.numel() or local.layout != torch.strided:
        return None
    try:
        memory = local.untyped_storage().data_ptr()
    except RuntimeError:  # what wraps others has a storage in name only
        return None
    if not memory:
        return None
    shape, strides, size, device = tuple(local.shape), local.stride(), local.element_size(), local.device
    start = memory + int(local.storage_offset()) * size
    stop, turned = start + _reach(shape, strides) * size, (local.is_conj(), local.is_neg())
    return Span((device.type, device.index or 0), start, stop, size, shape, strides, turned)


@remembered(4096)
def _reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to behind the last."""
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


@remembered(4096)
def _meets_itself(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether two elements of a tensor have one address."""
    reach = 1
    for stride, n in sorted((stride, n) for n, stride in zip(shape, strides, strict=True) if n > 1):
        if stride < reach:  # dims lie between one another, and may or may not meet
            return stride == 0 or _meets_itself_for_sure(shape, strides)
        reach += (n - 1) * stride
    return False


def _meets_itself_for_sure(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    mask = torch.zeros(_reach(shape, strides), dtype=torch.bool, device="cpu")
    mask.as_strided(shape, strides).fill_(True)
    return int(mask.count_nonzero()) < prod(shape)


def _clusters(spans: list[_Named]) -> Iterator[list[_Named]]:
    """Of spans in order, those that reach into others: columns of one matrix, say, which share nothing."""
    cluster: list[_Named] = []
    device, stop = None, 0
    for one in spans:
        here, start, end, *_ = one[0]
        if here != device or start >= stop:
            yield cluster
            cluster, device, stop = [], here, end
        stop = max(stop, end)
        cluster.append(one)
    yield cluster


def _without_twins(cluster: list[_Named], alike: Callable[[str, str], bool]) -> list[_Named]:
    firsts: dict[Span, str] = {}
    for span, name in cluster:
        first = firsts.setdefault(span, name)
        if first != name and not alike(first, name):
            raise CheckpointError(_sharing(first, name))
    return list(firsts.items())


def _refuse_marked(cluster: list[_Named]) -> None:
    """Mark the elements of one tensor after the other. Raises CheckpointError where one is marked already."""
    if len(cluster) < 2:
        return
    low = cluster[0][0].start
    unit = gcd(*(n for span, _ in cluster for n in (span.start - low, span.itemsize)))
    mask = torch.zeros((max(span.stop for span, _ in cluster) - low) // unit, dtype=torch.bool, device="cpu")
    for number, (span, name) in enumerate(cluster):
        mine = _marks(mask, span, low, unit)
        if bool(mine.any()):
            for other, another in cluster[:number]:
                mask.zero_()
                _marks(mask, other, low, unit).fill_(True)
                if bool(mine.any()):
                    raise CheckpointError(_sharing(another, name))
        mine.fill_(True)


def _marks(mask: torch.Tensor, span: Span, low: int, unit: int) -> torch.Tensor:
    """The marks of a tensor's elements, several of each where others have smaller ones."""
    each = span.itemsize // unit
    strides = (*(stride * each for stride in span.strides), 1)
    return mask.as_strided((*span.shape, each), strides, (span.start - low) // unit)


def _sharing(one: str, other: str) -> str:
    return (
        f"{one} and {other} share elements in memory and are not one tensor, so that one would be written "
        "over the other: give each memory of its own (clone one of them), or load one of them alone"
    )

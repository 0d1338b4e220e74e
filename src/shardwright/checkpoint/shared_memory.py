"""Tensors that lie in one memory: they are one tensor, or a load would write one over the other.

What it writes may be the same, then it is right: of a buffer that shows another one in another shape.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from math import gcd, prod
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from shardwright.checkpoint.pieces import part_of
from shardwright.comm.dtype import as_bytes
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


Named = tuple[Span, str]
Alike = Callable[[str, str], bool]


def memory_of(tensor: torch.Tensor, span: Span | None) -> Hashable:
    """Equal for tensors that are one: one object, or the same elements in memory, read in the same way.

    So are tensors that were tied by `one.data = other.data`, and views of one tensor that show all of it.

    Args: span: that of the tensor.
    """
    if span is None:
        return id(tensor)
    return span, layout_of(tensor) if isinstance(tensor, DTensor) else tensor.dtype  # a layout has its own


class Shared(NamedTuple):
    """Two tensors that share elements, or one twice that does so with itself, and all that lie among theirs.

    members: these two included.
    """

    one: str
    other: str
    members: list[Named]


def refuse_overlaps(placed: Iterable[tuple[str, Span | None]], alike: Alike) -> None:
    """Raises CheckpointError where to write one tensor is to write into another, or twice into itself.

    Args and cost: as `shared_by`.
    """
    for shared in shared_by(placed, alike):
        raise CheckpointError(_sharing(shared))


def shared_by(placed: Iterable[tuple[str, Span | None]], alike: Alike) -> Iterator[Shared]:
    """Tensors that lie among each other, some of which share elements, and those that do so with themselves.

    Args:
        placed: tensors by name, each with its span.
        alike: whether two tensors, by name, get the same elements; then they may be one memory.
    Cost: a sort; where tensors lie between one another's elements, a byte of memory for each of these.
    """
    spans = sorted((span, name) for name, span in placed if span is not None)
    for cluster in _clusters(spans):
        pair = _meeting(cluster, alike) if len(cluster) > 1 else None
        if pair is None:
            pair = next(((n, n) for span, n in cluster if _meets_itself(span.shape, span.strides)), None)
        if pair is not None:
            yield Shared(*pair, cluster)


def refuse_different(shared: Shared, found: Mapping[str, torch.Tensor]) -> None:
    """Raises CheckpointError where elements that tensors share are to get other values by each.

    Args: found: what each is to hold.
    Cost: twice the memory that they lie in, on the host.
    """
    members = shared.members
    if len({span.turned for span, _ in members}) > 1:
        raise CheckpointError(_sharing(shared))
    low = members[0][0].start
    length = max(span.stop for span, _ in members) - low
    values, known = (torch.zeros(length, dtype=kind, device="cpu") for kind in (torch.uint8, torch.bool))
    for span, name in members:
        mine = as_bytes(found[name].cpu()).view(*span.shape, span.itemsize)
        once = shown_once(mine, span.strides)
        there, is_known = (_marks(each, span, low, 1) for each in (values, known))
        differs = bool(((once != there) & is_known).any())
        there.copy_(once)
        is_known.fill_(True)
        if differs or bool((there.expand_as(mine) != mine).any()):
            raise CheckpointError(f"{_sharing(shared)}. The checkpoint has other values of them in {name}")


def shown_once(tensor: torch.Tensor, strides: Iterable[int]) -> torch.Tensor:
    """The first entry of each dim along which a tensor of these strides shows the same elements again."""
    for dim, stride in enumerate(strides):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


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


def _clusters(spans: list[Named]) -> Iterator[list[Named]]:
    """Of spans in order, those that reach into others: columns of one matrix, say, which share nothing."""
    cluster: list[Named] = []
    device, stop = None, 0
    for one in spans:
        here, start, end, *_ = one[0]
        if here != device or start >= stop:
            yield cluster
            cluster, device, stop = [], here, end
        stop = max(stop, end)
        cluster.append(one)
    yield cluster


def _meeting(cluster: list[Named], alike: Alike) -> tuple[str, str] | None:
    """Two tensors one of which holds an element of the other; they may be one memory if they are alike."""
    firsts: dict[Span, str] = {}
    for span, name in cluster:
        first = firsts.setdefault(span, name)
        if first != name and not alike(first, name):
            return first, name
    if len(firsts) < 2:
        return None
    low = cluster[0][0].start
    unit = gcd(*(n for span in firsts for n in (span.start - low, span.itemsize)))
    mask = torch.zeros((max(span.stop for span in firsts) - low) // unit, dtype=torch.bool, device="cpu")
    for span, name in firsts.items():
        mine = _marks(mask, span, low, unit)
        if bool(mine.any()):
            for other, another in firsts.items():
                mask.zero_()
                _marks(mask, other, low, unit).fill_(True)
                if bool(mine.any()):
                    return another, name
        mine.fill_(True)
    return None


def _marks(mask: torch.Tensor, span: Span, low: int, unit: int) -> torch.Tensor:
    """The marks of a tensor's elements, several of each where others have smaller ones."""
    each = span.itemsize // unit
    strides = (*(stride * each for stride in span.strides), 1)
    whole = mask.as_strided((*span.shape, each), strides, (span.start - low) // unit)
    return shown_once(whole, span.strides)


def _sharing(shared: Shared) -> str:
    if shared.one == shared.other:
        strides = next(span.strides for span, name in shared.members if name == shared.one)
        return (
            f"{shared.one} has elements that share their memory (its strides are {strides}), and would be "
            "written over itself: clone it first"
        )
    return (
        f"{shared.one} and {shared.other} share elements in memory and are not one tensor, so that one would "
        "be written over the other: give each memory of its own (clone one of them), or load one of them "
        "alone"
    )

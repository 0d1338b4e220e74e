"""A tensor beside its pattern, and the pattern spelled out: one item per dim of the tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.errors import RuleError
from shardwright.rules.call import Call, Operand
from shardwright.rules.notation import Ellipsis_, Fixed, Item, Label, Pattern, Subst


class BindingError(RuleError):
    """A formula does not fit a call: another number of operands or dims, or sizes that disagree."""


@dataclass(slots=True)
class Described:
    """One tensor beside the pattern that describes it."""

    name: str
    shape: tuple[int, ...]
    pattern: Pattern
    operand: Operand | None
    items: tuple[Item, ...] = ()


def spell_out(tensor: Described, call: Call, rank: int | None) -> tuple[Item, ...]:
    """The pattern with one item per dim of the tensor."""
    pattern, ndim = tensor.pattern, len(tensor.shape)
    if pattern.replicate or pattern.anything:
        return tuple(Fixed(size) for size in tensor.shape)
    found = find_ellipsis(pattern)
    if found is None:
        return _drop_optional(pattern.items, tensor)
    at, ellipsis_ = found
    before, after = pattern.items[:at], pattern.items[at + 1 :]
    count = ndim - len(before) - len(after)
    if count < 0:
        raise BindingError(f"{tensor.name} has {ndim} dims, its pattern at least {ndim - count}")
    if ellipsis_.substs and rank is not None:
        middle = _substituted(ellipsis_.substs, call, rank, count, tensor.name)
    else:
        middle = free_labels(count)
    return (*before, *middle, *after)


def find_ellipsis(pattern: Pattern) -> tuple[int, Ellipsis_] | None:
    """Where a pattern has its `...`, and what it is; None if it has none."""
    for at, item in enumerate(pattern.items):
        if isinstance(item, Ellipsis_):
            return at, item
    return None


def free_labels(count: int) -> tuple[Item, ...]:
    """The labels of `count` broadcastable dims: numbered from the right, so that they align there."""
    return tuple(Label(f".{count - 1 - i}", optional=True) for i in range(count))


def _drop_optional(items: tuple[Item, ...], tensor: Described) -> tuple[Item, ...]:
    kept = list(items)
    while len(kept) > len(tensor.shape):
        optional = [i for i, item in enumerate(kept) if isinstance(item, Label) and item.optional]
        if not optional:
            raise BindingError(f"{tensor.name} has {len(tensor.shape)} dims, its pattern {len(items)}")
        kept.pop(optional[0])
    if len(kept) < len(tensor.shape):
        raise BindingError(f"{tensor.name} has {len(tensor.shape)} dims, its pattern {len(items)}")
    return tuple(kept)


def _substituted(substs: tuple[Subst, ...], call: Call, rank: int, count: int, name: str) -> tuple[Item, ...]:
    """The dims of `...[ARG: labels]`: free labels of a tensor of `rank` dims, some replaced or dropped."""
    replaced: dict[int, Label | None] = {}
    for subst in substs:
        replaced.update(_replacements(subst, call, rank))
    dropped = sum(label is None for label in replaced.values())
    keep = count == rank and dropped > 0
    if count not in {rank, rank - dropped}:
        raise BindingError(f"{name} has {count} dims where {rank - dropped} were expected")
    items: list[Item] = []
    for dim in range(rank):
        # Beside named dims nothing broadcasts: an index of size 1 is a short index, not a repeated one.
        label = replaced.get(dim, Label(f".{rank - 1 - dim}"))
        if label is not None:
            items.append(label)
        elif keep:
            items.append(Fixed(1))
    return tuple(items)


def _replacements(subst: Subst, call: Call, rank: int) -> dict[int, Label | None]:
    dims = dims_of(call.arg(subst.arg), rank)
    if not subst.labels:
        return dict.fromkeys(dims)
    if len(subst.labels) == len(dims):
        return dict(zip(dims, subst.labels, strict=True))
    if len(subst.labels) == 1:
        label = subst.labels[0]
        return {dim: _numbered(label, i) for i, dim in enumerate(dims)}
    if not dims:
        return {}
    raise BindingError(f"argument {subst.arg} names {len(dims)} dims, the rule {len(subst.labels)} labels")


def _numbered(label: Label, index: int) -> Label:
    return label if label.name == "_" else Label(f"{label.name}{index}", label.whole, label.optional)


def dims_of(value: object, rank: int) -> tuple[int, ...]:
    """The dims that a `dim` argument names, none negative; None and an empty list name all of them."""
    if rank == 0:
        return ()
    if value is None or value in ((), []):
        return tuple(range(rank))
    if isinstance(value, int):
        return (value % rank,)
    if isinstance(value, Iterable):
        return tuple(int(dim) % rank for dim in value)
    raise BindingError(f"{value!r} names no dim")

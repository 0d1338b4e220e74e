"""What a formula says of the tensors of one call: one item per dim, and how long each label is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

from shardwright.errors import RuleError
from shardwright.rules.call import Call, Operand
from shardwright.rules.formula import Formula
from shardwright.rules.notation import Ellipsis_, Fixed, Group, Item, Label, Pattern, Subst


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


# ---------------------------------------------------------------------------- sizes


@dataclass(slots=True)
class LabelSizes:
    """Sizes of labels while they are being found out."""

    formula: Formula
    known: dict[str, int] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    broadcast: set[str] = field(default_factory=set)

    def see(self, label: str, size: int) -> None:
        """Take note that `label` has this size somewhere."""
        before = self.known.setdefault(label, size)
        if before == size:
            return
        if label in self.broadcast and 1 in {before, size}:
            self.known[label] = max(before, size) if 0 not in {before, size} else 0
        elif label in self.formula.prefix or "*" in self.formula.prefix:
            self.known[label] = max(before, size)
            self.whole.add(label)
        else:
            raise BindingError(f"label {label} is {before} on one tensor, {size} on another")


def solve_sizes(formula: Formula, call: Call, tensors: list[Described]) -> LabelSizes:
    """The sizes of all labels. Raises: BindingError: two tensors disagree, or nothing tells a size."""
    sizes = LabelSizes(formula)
    for arg, label in formula.ints:
        value = call.arg(arg)
        if isinstance(value, int):
            sizes.known[label] = value
    pending: list[tuple[Described, int, Group]] = []
    for tensor in tensors:
        for dim, item in enumerate(tensor.items):
            _see(tensor, dim, item, sizes, pending)
    _solve_groups(pending, sizes)
    return sizes


def _see(
    tensor: Described, dim: int, item: Item, sizes: LabelSizes, pending: list[tuple[Described, int, Group]]
) -> None:
    size = tensor.shape[dim]
    if isinstance(item, Fixed):
        if item.size != size:
            raise BindingError(f"dim {dim} of {tensor.name} is {size}, the rule says {item.size}")
    elif isinstance(item, Group):
        sizes.whole.update(part.name for part in item.parts if isinstance(part, Label) and part.whole)
        pending.append((tensor, dim, item))
    elif isinstance(item, Label) and item.name != "_":
        if item.whole:
            sizes.whole.add(item.name)
        if item.optional:
            sizes.broadcast.add(item.name)
        sizes.see(item.name, size)


def _solve_groups(pending: list[tuple[Described, int, Group]], sizes: LabelSizes) -> None:
    """Find the one unknown factor of each group, the groups that know most first."""
    left = list(pending)
    while left:
        left.sort(key=lambda entry: len(_unknown(entry[2], sizes)))
        tensor, dim, group = left.pop(0)
        size, unknown = tensor.shape[dim], _unknown(group, sizes)
        known = [part for part in group.parts if part not in unknown]
        rest = prod(part.size if isinstance(part, Fixed) else sizes.known[part.name] for part in known)
        if len(unknown) > 1:
            names = " and ".join(part.name for part in unknown)
            raise BindingError(f"dim {dim} of {tensor.name}: nothing tells the sizes of {names}")
        if not unknown and rest != size:
            raise BindingError(f"dim {dim} of {tensor.name} is {size}, its factors make {rest}")
        if unknown:
            if rest == 0 or size % rest:
                raise BindingError(f"dim {dim} of {tensor.name} is {size}, not a multiple of {rest}")
            sizes.see(unknown[0].name, size // rest)


def _unknown(group: Group, sizes: LabelSizes) -> list[Label]:
    return [part for part in group.parts if isinstance(part, Label) and part.name not in sizes.known]

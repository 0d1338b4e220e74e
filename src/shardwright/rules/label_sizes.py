"""How long each label of a formula is for one call, from the shapes of its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from shardwright.rules.call import Call
from shardwright.rules.described import BindingError, Described
from shardwright.rules.formula import Formula
from shardwright.rules.notation import Fixed, Group, Item, Label


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
        rest = prod(_length(part, sizes) for part in group.parts if part not in unknown)
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


def _length(part: Label | Fixed, sizes: LabelSizes) -> int:
    return part.size if isinstance(part, Fixed) else sizes.known[part.name]

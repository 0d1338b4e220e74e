"""Bind a formula to a call: match patterns with tensors, solve the sizes of the labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

import torch

from shardwright.errors import RuleError
from shardwright.rules.call import Call, Operand, TensorInfo, parameters_of
from shardwright.rules.equation import BoundHom, Dim, Equation, Factor, Slot
from shardwright.rules.formula import Formula, parse_hom
from shardwright.rules.notation import Ellipsis_, Fixed, Group, Item, Label, Notation, Pattern, Subst, parse
from shardwright.rules.notation import parse_pattern as _parse_pattern

_UNKNOWN = -1


class BindingError(RuleError):
    """A formula does not fit a call: another number of operands or dims, or sizes that disagree."""


@dataclass(slots=True)
class _Tensor:
    """One tensor beside the pattern that describes it."""

    name: str
    shape: tuple[int, ...]
    pattern: Pattern
    operand: Operand | None
    items: tuple[Item, ...] = ()


@dataclass(slots=True)
class _Sizes:
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


@lru_cache(maxsize=8192)
def bind(formula: Formula, call: Call) -> Equation:
    """The equation that `formula` states for `call`.

    Raises: BindingError: patterns and tensors do not fit, or the sizes of a label disagree.
    """
    notation = parse(formula.text)
    operands = list(_match_operands(notation, call))
    results = list(_match_results(notation, call))
    rank = _reference_rank(operands)
    for tensor in [*operands, *(result for result in results if result is not None)]:
        tensor.items = _spell_out(tensor, call, rank)
    sizes = _solve(formula, call, [*operands, *(result for result in results if result is not None)])
    return _equation(formula, call, operands, results, sizes)


def _match_operands(notation: Notation, call: Call) -> Iterator[_Tensor]:
    patterns = _Patterns(notation.operands, notation.text)
    outs = _Patterns(notation.results, notation.text)
    flat = {(operand.name, operand.position): operand for operand in call.flat_operands}
    for parameter in parameters_of(call.op):
        if not parameter.is_tensor:
            continue
        value = call.bound[parameter.name]
        source = outs if parameter.out else patterns
        if parameter.is_list and isinstance(value, tuple):
            for position, info in enumerate(value):
                if isinstance(info, TensorInfo):
                    operand = flat[parameter.name, position]
                    yield _Tensor(f"{parameter.name}[{position}]", info.shape, source.next(), operand)
        elif isinstance(value, TensorInfo):
            yield _Tensor(parameter.name, value.shape, source.next(), flat[parameter.name, None])
        elif not parameter.is_list:
            source.skip()
    patterns.finish()


def _match_results(notation: Notation, call: Call) -> Iterator[_Tensor | None]:
    patterns = _Patterns(notation.results, notation.text)
    for index, info in enumerate(call.results):
        if info is None:
            patterns.skip()
            yield None
        else:
            yield _Tensor(f"result {index}", info.shape, patterns.next(), None)


class _Patterns:
    """Hands out patterns in order; a starred one serves all that remain."""

    def __init__(self, patterns: tuple[Pattern, ...], text: str) -> None:
        self._patterns = patterns
        self._text = text
        self._at = 0

    def next(self) -> Pattern:
        if self._at >= len(self._patterns):
            raise BindingError(f"{self._text!r} describes {len(self._patterns)} tensors, the call has more")
        pattern = self._patterns[self._at]
        self._at += not pattern.star
        return pattern

    def skip(self) -> None:
        if self._at < len(self._patterns) and not self._patterns[self._at].star:
            self._at += 1

    def finish(self) -> None:
        left = self._patterns[self._at :]
        if left and not left[0].star:
            raise BindingError(f"{self._text!r} describes {len(self._patterns)} tensors, the call has fewer")


def _reference_rank(operands: list[_Tensor]) -> int | None:
    """The rank in which schema arguments count dims: that of the first operand written with `...`."""
    for tensor in operands:
        if any(isinstance(item, Ellipsis_) for item in tensor.pattern.items):
            return len(tensor.shape) - (len(tensor.pattern.items) - 1)
    return None


# ------------------------------------------------------------------------------- patterns to items


def _spell_out(tensor: _Tensor, call: Call, rank: int | None) -> tuple[Item, ...]:
    """The pattern with one item per dim of the tensor."""
    pattern, ndim = tensor.pattern, len(tensor.shape)
    if pattern.replicate or pattern.anything:
        return tuple(Fixed(size) for size in tensor.shape)
    at = next((i for i, item in enumerate(pattern.items) if isinstance(item, Ellipsis_)), None)
    if at is None:
        return _drop_optional(pattern.items, tensor)
    ellipsis_ = pattern.items[at]
    if not isinstance(ellipsis_, Ellipsis_):  # pragma: no cover  narrows the type
        raise BindingError("unreachable")
    before, after = pattern.items[:at], pattern.items[at + 1 :]
    count = ndim - len(before) - len(after)
    if count < 0:
        raise BindingError(f"{tensor.name} has {ndim} dims, its pattern at least {ndim - count}")
    if ellipsis_.substs and rank is not None:
        middle = _substituted(ellipsis_.substs, call, rank, count, tensor.name)
    else:
        middle = tuple(_free(count - 1 - i) for i in range(count))
    return (*before, *middle, *after)


def _free(from_right: int) -> Label:
    return Label(f".{from_right}", optional=True)


def _drop_optional(items: tuple[Item, ...], tensor: _Tensor) -> tuple[Item, ...]:
    kept = list(items)
    while len(kept) > len(tensor.shape):
        optional = [i for i, item in enumerate(kept) if isinstance(item, Label) and item.optional]
        if not optional:
            raise BindingError(f"{tensor.name} has {len(tensor.shape)} dims, its pattern {len(items)}")
        kept.pop(optional[0])
    if len(kept) < len(tensor.shape):
        raise BindingError(f"{tensor.name} has {len(tensor.shape)} dims, its pattern {len(items)}")
    return tuple(kept)


def _substituted(
    substs: tuple[Subst, ...], call: Call, rank: int, count: int, name: str
) -> tuple[Item, ...]:
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


# ------------------------------------------------------------------------------------ items to sizes


def _solve(formula: Formula, call: Call, tensors: list[_Tensor]) -> _Sizes:
    sizes = _Sizes(formula)
    for arg, label in formula.ints:
        value = call.arg(arg)
        if isinstance(value, int):
            sizes.known[label] = value
    pending: list[tuple[_Tensor, int, Group]] = []
    for tensor in tensors:
        for dim, item in enumerate(tensor.items):
            _see(tensor, dim, item, sizes, pending)
    _solve_groups(pending, sizes)
    return sizes


def _see(
    tensor: _Tensor, dim: int, item: Item, sizes: _Sizes, pending: list[tuple[_Tensor, int, Group]]
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


def _solve_groups(pending: list[tuple[_Tensor, int, Group]], sizes: _Sizes) -> None:
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


def _unknown(group: Group, sizes: _Sizes) -> list[Label]:
    return [part for part in group.parts if isinstance(part, Label) and part.name not in sizes.known]


def _length(part: Label | Fixed, sizes: _Sizes) -> int:
    return part.size if isinstance(part, Fixed) else sizes.known[part.name]


# --------------------------------------------------------------------------------- sizes to equation


def _equation(
    formula: Formula, call: Call, operands: list[_Tensor], results: list[_Tensor | None], sizes: _Sizes
) -> Equation:
    index = {label: i for i, label in enumerate(sizes.known)}
    unknown = {label for _, label in formula.ints} - set(index)
    if unknown:
        raise BindingError(f"nothing tells the size of {', '.join(sorted(unknown))}")
    slots = tuple(_slot(tensor, index, sizes) for tensor in operands)
    made = tuple(None if tensor is None else _slot(tensor, index, sizes) for tensor in results)
    return Equation(
        formula=formula,
        labels=tuple(index),
        sizes=tuple(sizes.known.values()),
        whole=frozenset(index[label] for label in sizes.whole if label in index),
        operands=slots,
        results=made,
        aliases=aliases_of(call),
        homs=tuple(_homs(formula, call, slots)),
        ints=tuple((arg, index[label]) for arg, label in formula.ints),
        shapes=tuple(
            (arg, _shape(text, made, index, call.arg(arg), sizes)) for arg, text in formula.shapes
        ),
    )


def _shape(
    text: str, results: tuple[Slot | None, ...], index: dict[str, int], value: object, sizes: _Sizes
) -> tuple[Dim, ...]:
    """The dims of a shape argument; `@0` means those of result 0."""
    if not text.startswith("@"):
        return _shape_dims(_parse_pattern(text), index, value, sizes)
    slot = results[int(text[1:])]
    return () if slot is None else slot.dims


def _slot(tensor: _Tensor, index: dict[str, int], sizes: _Sizes) -> Slot:
    dims = tuple(
        _dim(item, size, index, sizes) for item, size in zip(tensor.items, tensor.shape, strict=True)
    )
    operand = tensor.operand
    return Slot(
        name=tensor.name if operand is None else operand.name,
        dims=dims,
        metadata=tensor.pattern.metadata,
        anything=tensor.pattern.anything,
        mutated=operand is not None and operand.mutated,
        out=operand is not None and operand.out,
    )


def _dim(item: Item, size: int, index: dict[str, int], sizes: _Sizes) -> Dim:
    if isinstance(item, Group):
        return Dim(tuple(_factor(part, index) for part in item.parts))
    if isinstance(item, Label) and item.name != "_" and sizes.known[item.name] == size:
        return Dim((Factor(index[item.name]),))
    return Dim((Factor(-1, size),))


def _factor(part: Label | Fixed, index: dict[str, int]) -> Factor:
    return Factor(-1, part.size) if isinstance(part, Fixed) else Factor(index[part.name])


def _shape_dims(pattern: Pattern, index: dict[str, int], value: object, sizes: _Sizes) -> tuple[Dim, ...]:
    """The dims of a shape argument; `...` takes free labels from the right, as for an operand."""
    shape = tuple(int(size) for size in value) if isinstance(value, Iterable) else ()
    tensor = _Tensor("a shape", shape, pattern, None)
    at = next((i for i, item in enumerate(pattern.items) if isinstance(item, Ellipsis_)), None)
    if at is None:
        items = pattern.items
    else:
        count = len(shape) - len(pattern.items) + 1
        middle = tuple(_free(count - 1 - i) for i in range(count))
        items = (*pattern.items[:at], *middle, *pattern.items[at + 1 :])
    tensor.items = items
    if len(items) != len(shape):
        raise BindingError(f"a shape argument has {len(shape)} dims, its pattern {len(items)}")
    return tuple(_shape_dim(item, size, index, sizes) for item, size in zip(items, shape, strict=True))


def _shape_dim(item: Item, size: int, index: dict[str, int], sizes: _Sizes) -> Dim:
    # A size of -1 ("infer", "keep") is made explicit: the local size cannot be inferred everywhere.
    if isinstance(item, Label) and item.name in index and size in {-1, sizes.known[item.name]}:
        return Dim((Factor(index[item.name]),))
    if isinstance(item, Group):
        return _dim(item, size, index, sizes)
    return Dim((Factor(-1, size),))


def _homs(formula: Formula, call: Call, slots: tuple[Slot, ...]) -> Iterator[BoundHom]:
    for text in formula.hom:
        for hom in parse_hom(text):
            if not call.bound.keys() >= set(hom.args):  # a foreach form that names its arguments otherwise
                continue
            present = {name for name in hom.args if call.bound[name] is not None}
            operands = frozenset(i for i, slot in enumerate(slots) if slot.name in present)
            # A number where the fact speaks of a tensor makes the op affine: the fact does not hold.
            if operands and present <= {slot.name for slot in slots}:
                yield BoundHom(operands, hom)


def aliases_of(call: Call) -> tuple[int | None, ...]:
    """Per flattened result, the operand that the op writes and returns as this result, or None."""
    by_set = _alias_sets(call.op)
    names = [operand.name for operand in call.flat_operands]
    found: list[int | None] = []
    for index in range(len(call.results)):
        name = by_set[index] if index < len(by_set) else None
        found.append(names.index(name) if name in names else None)
    return tuple(found)


@lru_cache(maxsize=4096)
def _alias_sets(op: torch._ops.OpOverload) -> tuple[str | None, ...]:
    writes = {
        frozenset(argument.alias_info.before_set): argument.name
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    found: list[str | None] = []
    for result in op._schema.returns:
        info = result.alias_info
        found.append(writes.get(frozenset(info.before_set)) if info is not None and info.is_write else None)
    return tuple(found)

"""Bind a formula to a call: match patterns with tensors, solve the sizes of the labels."""

from __future__ import annotations

from cmath import isfinite
from collections.abc import Iterable, Iterator

from shardwright.remember import remembered
from shardwright.rules.call import Call, TensorInfo, aliases_of, parameters_of
from shardwright.rules.described import (
    BindingError,
    Described,
    LabelSizes,
    find_ellipsis,
    solve_sizes,
    spell_out,
)
from shardwright.rules.equation import UNTOLD, BoundHom, Dim, Equation, Factor, Slot
from shardwright.rules.formula import Formula, parse_hom
from shardwright.rules.notation import Fixed, Group, Item, Label, Notation, Pattern, parse, parse_pattern


@remembered(8192)
def bind(formula: Formula, call: Call) -> Equation:
    """The equation that `formula` states for `call`.

    Raises: BindingError: patterns and tensors do not fit, or the sizes of a label disagree.
    """
    notation = parse(formula.text)
    operands = list(_match_operands(notation, call))
    results = list(_match_results(notation, call))
    rank = _reference_rank(operands)
    for tensor in [*operands, *(result for result in results if result is not None)]:
        tensor.items = spell_out(tensor, call, rank)
    sizes = solve_sizes(formula, call, [*operands, *(result for result in results if result is not None)])
    return _equation(formula, call, operands, results, sizes)


def _match_operands(notation: Notation, call: Call) -> Iterator[Described]:
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
                    yield Described(f"{parameter.name}[{position}]", info.shape, source.next(), operand)
        elif isinstance(value, TensorInfo):
            yield Described(parameter.name, value.shape, source.next(), flat[parameter.name, None])
        elif not parameter.is_list:
            source.skip()
    patterns.finish()


def _match_results(notation: Notation, call: Call) -> Iterator[Described | None]:
    patterns = _Patterns(notation.results, notation.text)
    for index, info in enumerate(call.results):
        if info is None:
            patterns.skip()
            yield None
        else:
            yield Described(f"result {index}", info.shape, patterns.next(), None)


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


def _reference_rank(operands: list[Described]) -> int | None:
    """The rank in which schema arguments count dims: that of the first operand written with `...`."""
    for tensor in operands:
        if find_ellipsis(tensor.pattern) is not None:
            return len(tensor.shape) - (len(tensor.pattern.items) - 1)
    return None


def _equation(
    formula: Formula,
    call: Call,
    operands: list[Described],
    results: list[Described | None],
    sizes: LabelSizes,
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
        shapes=tuple((arg, _shape(text, arg, call, made, sizes)) for arg, text in formula.shapes),
    )


def _slot(tensor: Described, index: dict[str, int], sizes: LabelSizes) -> Slot:
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


def _dim(item: Item, size: int, index: dict[str, int], sizes: LabelSizes) -> Dim:
    if isinstance(item, Group):
        return Dim(tuple(_factor(part, index) for part in item.parts))
    if isinstance(item, Label) and item.name == "_":
        return Dim((Factor(UNTOLD, size),))
    if isinstance(item, Label) and sizes.known[item.name] == size:
        return Dim((Factor(index[item.name]),))
    return Dim((Factor(-1, size),))


def _factor(part: Label | Fixed, index: dict[str, int]) -> Factor:
    return Factor(-1, part.size) if isinstance(part, Fixed) else Factor(index[part.name])


def _shape(
    text: str, arg: str, call: Call, made: tuple[Slot | None, ...], sizes: LabelSizes
) -> tuple[Dim, ...]:
    """The dims of a shape argument; `@0` means those of result 0."""
    if text.startswith("@"):
        slot = made[int(text[1:])]
        return () if slot is None else slot.dims
    value = call.arg(arg)
    shape = tuple(int(size) for size in value) if isinstance(value, Iterable) else ()
    items = spell_out(Described("a shape argument", shape, parse_pattern(text), None), call, None)
    index = {label: i for i, label in enumerate(sizes.known)}
    return tuple(_shape_dim(item, size, index, sizes) for item, size in zip(items, shape, strict=True))


def _shape_dim(item: Item, size: int, index: dict[str, int], sizes: LabelSizes) -> Dim:
    # A size of -1 ("infer", "keep") is made explicit: the local size cannot be inferred everywhere.
    if isinstance(item, Label) and item.name in index and size in {-1, sizes.known[item.name]}:
        return Dim((Factor(index[item.name]),))
    if isinstance(item, Group):
        return _dim(item, size, index, sizes)
    return Dim((Factor(-1, size),))


_LINEAR = frozenset({"sum", "avg", "*"})


def _homs(formula: Formula, call: Call, slots: tuple[Slot, ...]) -> Iterator[BoundHom]:
    # Terms times an infinite number are infinite with either sign, or none: their sum is no number.
    is_finite = all(isfinite(value) for value in call.bound.values() if isinstance(value, float | complex))
    for text in formula.hom:
        for hom in parse_hom(text):
            if not is_finite and hom.source in _LINEAR:
                continue
            if not call.bound.keys() >= set(hom.args):  # a foreach form that names its arguments otherwise
                continue
            present = {name for name in hom.args if call.bound[name] is not None}
            operands = frozenset(i for i, slot in enumerate(slots) if slot.name in present)
            # A number where the fact speaks of a tensor makes the op affine: the fact does not hold.
            if operands and present <= {slot.name for slot in slots}:
                yield BoundHom(operands, hom)

"""A decision without its sizes: what was decided for one shape, for every shape of the same kind.

The rule of an op says which dims of its tensors are the same label. Where the search looked at no size
(nothing had to move, every dim is one label), the same call on tensors of other sizes is run in the same way,
and the shapes of its results follow from the labels. Not a cache of shapes: it serves shapes never seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from shardwright.index.region import Shape
from shardwright.layout.kind import Kind
from shardwright.layout.layout import Layout
from shardwright.rules.call import Call
from shardwright.rules.equation import UNTOLD, Dim, Equation, Slot
from shardwright.rules.registry import registry
from shardwright.rules.search import Choice

Place = tuple[int, int]  # an operand and one of its dims
_NOTHING: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ResultForm:
    """One result: its kind and where its sizes stand; `like`: the operand whose layout it has, if any."""

    kind: Kind
    sizes: tuple[Place | int, ...]  # a dim of an operand, or 0 or 1 itself
    like: int | None

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        """The result's shape for operands of these shapes."""
        return _shape(self.sizes, shapes)


def _shape(places: tuple[Place | int, ...], shapes: Sequence[Shape]) -> Shape:
    return tuple([place if place.__class__ is int else shapes[place[0]][place[1]] for place in places])  # type: ignore[index]


@dataclass(frozen=True, slots=True)
class AnySize:
    """How to run a call, whatever the sizes.

    Args:
        moved: operands that need another placement (which costs nothing), with the kind that they then have.
        results: one per flattened result; None where the op returns no tensor.
        equal: places that show the same label: their sizes must agree, else the op is refused elsewhere.
        arguments: schema arguments that are a shape, with the places where its sizes stand.
        held: the labels that what ranks call in place of the op asks for, with the places of their sizes.
    """

    moved: tuple[tuple[int, Kind], ...]
    results: tuple[ResultForm | None, ...]
    equal: tuple[tuple[Place, Place], ...]
    arguments: tuple[tuple[str, tuple[Place | int, ...]], ...] = ()
    held: tuple[tuple[str, Place], ...] = ()

    def fits(self, shapes: Sequence[Shape], arguments: Iterable[Sequence[int]]) -> bool:
        """Whether the sizes agree as the rule says, those in `arguments` (in their order here) too."""
        return all(shapes[a][i] == shapes[b][j] for (a, i), (b, j) in self.equal) and all(
            tuple(given) == _shape(places, shapes)
            for given, (_, places) in zip(arguments, self.arguments, strict=True)
        )


def for_any_size(
    call: Call,
    layouts: tuple[Layout, ...],
    equation: Equation,
    choice: Choice,
    inputs: tuple[Layout, ...],
    outputs: tuple[Layout | None, ...],
) -> AnySize | None:
    """The decision without its sizes; None where it depends on them."""
    if not choice.any_size or not all(rule.any_size for rule in registry.rules_of(call.op)):
        return None
    return same_way(call, layouts, equation, inputs, outputs, constants=False)


def same_way(
    call: Call,
    layouts: tuple[Layout, ...],
    equation: Equation,
    inputs: tuple[Layout, ...],
    outputs: tuple[Layout | None, ...],
    *,
    constants: bool = True,
) -> AnySize | None:
    """The same equation, cut in the same way, for other sizes where it is chosen; None where they matter.

    constants: what shows no label of an operand is as long as it is here, which is for the caller to see.
    """
    stated = equation.formula
    decided_by_one = (stated.ints or stated.prefix) and not constants
    if stated.strides or stated.even or equation.grouped or decided_by_one:
        return None
    if len({x.order for x in layouts}) > 1:
        return None
    kinds = [layout.kind for layout in (*layouts, *inputs)]
    places = _places(equation)
    told = dict(enumerate(equation.sizes)) if constants else _NOTHING
    results = [
        None if output is None or slot is None else _result(slot, output, layouts, places, constants, told)
        for slot, output in zip(equation.results, outputs, strict=True)
    ]
    unknown = any(form is None and output is not None for form, output in zip(results, outputs, strict=True))
    if unknown or any(kind is None for kind in kinds):
        return None
    moved = tuple(
        (operand, want.kind)
        for operand, (have, want) in enumerate(zip(layouts, inputs, strict=True))
        if have != want and want.kind is not None
    )
    equal = tuple((group[0], other) for group in places.values() for other in group[1:])
    arguments = tuple(
        (name, _known([_size(dim, places, False) for dim in dims])) for name, dims in equation.shapes
    )
    labels = enumerate(equation.labels)
    held = tuple((name, places[n][0]) for n, name in labels if name in stated.held and n in places)
    form = AnySize(moved, tuple(results), equal, arguments, held)
    given = [call.arg(name) for name, _ in arguments]
    return form if form.fits([layout.shape for layout in layouts], given) else None


def _places(equation: Equation) -> dict[int, list[Place]]:
    """Where each label stands on the operands."""
    found: dict[int, list[Place]] = {}
    for operand, slot in enumerate(equation.operands):
        for dim, entry in enumerate(slot.dims):
            label = entry.factors[0].label
            if label >= 0:
                found.setdefault(label, []).append((operand, dim))
    return found


def _result(
    slot: Slot,
    output: Layout,
    layouts: tuple[Layout, ...],
    places: dict[int, list[Place]],
    constants: bool,
    told: Mapping[int, int],
) -> ResultForm | None:
    sizes = [_size(dim, places, constants, told) for dim in slot.dims]
    known = _known(sizes)
    if output.kind is None or len(known) < len(sizes):
        return None
    like = [i for i, layout in enumerate(layouts) if layout == output and _shows(i, slot, places)]
    form = ResultForm(output.kind, known, like[0] if like else None)
    return form if form.shape([layout.shape for layout in layouts]) == output.shape else None


def _known(sizes: list[Place | int | None]) -> tuple[Place | int, ...]:
    return tuple(size for size in sizes if size is not None)


def _size(
    dim: Dim, places: dict[int, list[Place]], constants: bool, told: Mapping[int, int] = _NOTHING
) -> Place | int | None:
    """told: the sizes of labels that an argument gives, where they may be constants."""
    factor = dim.factors[0]
    if factor.label >= 0:
        return places[factor.label][0] if factor.label in places else told.get(factor.label)
    return factor.size if constants or (factor.size < 2 and factor.label != UNTOLD) else None


def _shows(operand: int, slot: Slot, places: dict[int, list[Place]]) -> bool:
    """Whether the operand has the result's labels, dim by dim."""
    return all(
        (operand, dim) in places.get(entry.factors[0].label, ()) or entry.factors[0].label < 0
        for dim, entry in enumerate(slot.dims)
    )

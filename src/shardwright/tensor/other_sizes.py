"""Prepared calls for shapes never seen: what was decided for one shape of a kind serves the others.

A look-up by kinds of layouts in place of layouts, then the layouts of the results from the labels of the
rule: no metadata call, no search. What does not fit (sizes that the rule says are equal and are not, a rank
that holds nothing) is prepared in the ordinary way, which also raises what one device raises.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardwright.layout.layout import Layout
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.prepare import Move, Prepared
from shardwright.tensor.spec import Spec, coords_of, spec_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from shardwright.rules.any_size import AnySize, ResultForm

_MANY = 65536
_known: dict[tuple[Any, ...], Prepared] = {}
# Ops with arguments that are a shape: their positions and names. Their values are no part of a key.
_shape_arguments: dict[torch._ops.OpOverload, frozenset[int | str]] = {}


class Query:
    """What is looked for: the op and its values, kinds in place of layouts; apart, arguments that are shapes.

    key: None where a layout has no kind.
    """

    __slots__ = ("func", "key", "shapes")

    def __init__(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.func = func
        self.shapes: dict[int | str, Any] = {}
        found: list[Any] = [func]
        known = self._describe(enumerate(args), found) and self._describe(kwargs.items(), found)
        self.key = tuple(found) if known else None

    def _describe(self, values: Any, found: list[Any]) -> bool:
        places = _shape_arguments.get(self.func, ())
        for place, value in values:
            if place in places:
                self.shapes[place] = value
                found.append(len(value))
                continue
            found.append(place)
            if not _describe(value, found):
                return False
        return True


def _describe(value: Any, found: list[Any]) -> bool:
    """Append what identifies a value; False for a layout without a kind, or an object that may change."""
    if isinstance(value, DTensor):
        kind = value._spec.layout.kind
        found.append(kind)
        return kind is not None
    if isinstance(value, list | tuple):
        found.append(len(value))
        return all(_describe(v, found) for v in value)
    found.append(value.__class__)
    found.append(value)
    return value.__hash__ is not None


def remember(query: Query, prepared: object) -> None:
    """Keep a prepared call that holds for other sizes."""
    if query.key is None or not isinstance(prepared, Prepared) or prepared.any_size is None:
        return
    names = {name for name, _ in prepared.any_size.arguments}
    if names and query.func not in _shape_arguments:
        schema = enumerate(query.func._schema.arguments)
        positions = {i for i, argument in schema if argument.name in names}
        _shape_arguments[query.func] = frozenset({*positions, *names})
        return  # the next call of the op has a key without them
    if len(_known) >= _MANY:
        _known.clear()
    _known[query.key] = prepared


def forget() -> None:
    """Forget them all: a rule came or went."""
    _known.clear()
    _shape_arguments.clear()


def adapt(query: Query, tensors: list[DTensor]) -> Prepared | None:
    """The prepared call of the same kind for these tensors; None if there is none or it does not fit."""
    known = _known.get(query.key) if query.key is not None else None
    if known is None or known.any_size is None:
        return None
    form = known.any_size
    shapes = [t._spec.layout.shape for t in tensors]
    if not form.fits(shapes, query.shapes.values()):
        return None
    moves = _moves(form, tensors)
    if moves is None:
        return None
    first = tensors[0]._spec
    use = first.use if all(t._spec.use == first.use for t in tensors) else None
    results = tuple(
        None if result is None else _spec(result, tensors, shapes, first, use) for result in form.results
    )
    return replace(known, moves=moves, results=results, skip=False, checked=False, simple=False)


def _moves(form: AnySize, tensors: list[DTensor]) -> tuple[Move, ...] | None:
    """The operands that are placed anew, without communication; None if this rank holds nothing of one."""
    moved = dict(form.moved)
    found: list[Move] = []
    for operand, tensor in enumerate(tensors):
        kind = moved.get(operand)
        if kind is None:
            local = tuple(tensor._local_tensor.shape)
        else:
            target = Layout.of_kind(kind, tensor._spec.layout.shape)
            coords = coords_of(tensor._spec.mesh)
            if coords is None:
                return None
            local = target.local_shape(coords)
            found.append(Move(operand, target))
        if 0 in local:
            return None
    return tuple(found)


def _spec(
    result: ResultForm, tensors: list[DTensor], shapes: list[tuple[int, ...]], first: Spec, use: Any
) -> Spec:
    if result.like is not None and tensors[result.like]._spec.use == use:
        return tensors[result.like]._spec
    return spec_of(Layout.of_kind(result.kind, result.shape(shapes)), first.mesh, use)

"""Prepared calls for shapes and numbers never seen: what was decided for one of a kind serves the others.

A look-up by kinds of specs in place of specs, then the layouts of the results from the labels of the rule: no
metadata call, no search. What does not fit (sizes that the rule says are equal and are not, a rank that holds
nothing) is prepared in the ordinary way, which also raises what one device raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwright.index.region import Shape
from shardwright.remember import memo, remembered
from shardwright.rules.any_size import AnySize, ResultForm
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.rules.op import is_pointwise
from shardwright.tensor.dispatch.prepared import Move, Prepared
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.spec import Spec, SpecKind, Token, spec_kind

_MANY = 65536
NUMBERS = frozenset({int, float, complex})  # True and False are settings
# Types in a schema; a tensor argument may be given a number.
_COMPUTED_WITH = frozenset({"number", "float", "Tensor", "Optional[number]", "Optional[float]"})
_known: dict[tuple[Any, ...], Known] = memo("calls of any size", {})
ops: set[Op] = memo("ops of which calls of any size are known", set())
# Ops with arguments that are a shape: their positions and names. Their values are no part of a key.
_shape_arguments: dict[Op, frozenset[int | str]] = memo("arguments that are a shape", {})


class Known:
    """A prepared call that holds for other sizes, and the kinds of its results.

    simple: nothing moves and there is one new tensor: the spec of the result is all that a call needs.
    """

    __slots__ = ("form", "kinds", "prepared", "simple")

    def __init__(self, prepared: Prepared, form: AnySize, kinds: tuple[SpecKind | None, ...]) -> None:
        self.prepared = prepared
        self.form = form
        self.kinds = kinds
        self.simple = prepared.simple and not form.arguments


def remember(func: Op, key: Sequence[Any], args: Args, kwargs: Kwargs, prepared: Prepared) -> None:
    """Keep a prepared call that holds for other sizes; it has run, so that its local shapes are checked."""
    form = prepared.any_size
    if form is None or not prepared.checked:
        return
    names = {name for name, _ in form.arguments}
    if _shape_arguments.get(func, names) and not names:
        return  # its other calls are known without the sizes that this one depends on
    if names and func not in _shape_arguments:
        positions = {i for i, argument in enumerate(func._schema.arguments) if argument.name in names}
        _shape_arguments[func] = frozenset({*positions, *names})
    if len(_known) >= _MANY:
        _known.clear()
    ops.add(func)
    kinds = tuple([None if spec is None else spec.kind for spec in prepared.results])
    _known[_key(func, key, args, kwargs, [])] = Known(prepared, form, kinds)


def adapt(
    func: Op, key: Sequence[Any], args: Args, kwargs: Kwargs, tensors: list[DTensor]
) -> Spec | Prepared | None:
    """The prepared call of the same kind for these tensors; None if there is none or it does not fit.

    Args: func: one of `ops`. key: what identifies the call, sizes included.
    Returns: the spec of the result where that is all that is needed.
    """
    arguments: list[Sequence[int]] = []
    known = _known.get(_key(func, key, args, kwargs, arguments))
    if known is None:
        return None
    specs = [t._spec for t in tensors]
    shapes = [spec.layout.shape for spec in specs]
    if not known.form.fits(shapes, arguments):
        return None
    if known.simple:
        if any(0 in t._local_tensor.shape for t in tensors):  # a rule may then need another local call
            return None
        return _spec(known, 0, specs, shapes)
    moves = _moves(known.form, tensors)
    if moves is None:
        return None
    results = tuple([_spec(known, index, specs, shapes) for index in range(len(known.kinds))])
    return replace(known.prepared, moves=moves, results=results, skip=False, checked=False, simple=False)


def _key(
    func: Op, key: Sequence[Any], args: Args, kwargs: Kwargs, arguments: list[Sequence[int]]
) -> tuple[Any, ...]:
    """The same with kinds in place of specs; `arguments` gets those that are shapes.

    A spec that has no kind stands for itself. Numbers that decide nothing are told apart by their class.
    """
    places = _shape_arguments.get(func, frozenset())
    numbers = computed_with(func)
    if numbers and numbers_decide(key):
        numbers = frozenset()
    if not places and not numbers:
        return tuple([part.spec.kind or part if part.__class__ is Token else part for part in key])
    found: list[Any] = [func, key[-1]]
    for place, value in (*enumerate(args), *kwargs.items()):
        found.append(place)
        if place in places:
            arguments.append(value)
            found.append(len(value))
        elif place in numbers and value.__class__ in NUMBERS:
            found.append(value.__class__)
        else:
            _describe(value, found)
    return tuple(found)


def numbers_decide(key: Sequence[Any]) -> bool:
    """Do they, because an operand is pending? A factor below 0 makes a largest value the least."""
    return any(part.__class__ is Token and part.spec.pending for part in key)


@remembered(4096)
def computed_with(func: Op) -> frozenset[int | str]:
    """The arguments, by position and by name, whose number is only computed with, element by element."""
    if not is_pointwise(func):
        return frozenset()
    named = [(i, a.name) for i, a in enumerate(func._schema.arguments) if str(a.type) in _COMPUTED_WITH]
    return frozenset(place for both in named for place in both)


def _describe(value: Any, found: list[Any]) -> None:
    spec = getattr(value, "_spec", None)
    if spec is not None:
        found.append(spec.kind or spec.token)
    elif isinstance(value, list | tuple):
        found.append(len(value))
        for part in value:
            _describe(part, found)
    elif isinstance(value, torch.SymFloat | torch.SymBool):
        found.append(value.__class__)  # comparing it with what is known would be a part of the graph
    else:
        found.append(value.__class__)
        found.append(value if value.__hash__ is not None else id(value))


def _moves(form: AnySize, tensors: list[DTensor]) -> tuple[Move, ...] | None:
    """The operands that are placed anew, without communication; None if this rank holds nothing of one."""
    moved = dict(form.moved)
    found: list[Move] = []
    for operand, tensor in enumerate(tensors):
        kind = moved.get(operand)
        if kind is None:
            local = tuple(tensor._local_tensor.shape)
        else:
            spec = tensor._spec
            target = spec_kind(kind, spec.mesh, spec.use).spec(spec.layout.shape).layout
            coords = spec.coords
            if coords is None:
                return None
            local = target.local_shape(coords)
            found.append(Move(operand, target, of_terms=False))
        if 0 in local:
            return None
    return tuple(found)


def _spec(known: Known, index: int, specs: list[Spec], shapes: list[Shape]) -> Spec | None:
    kind = known.kinds[index]
    form: ResultForm | None = known.form.results[index]
    if kind is None or form is None:
        return None
    if form.like is not None and specs[form.like].kind is kind:
        return specs[form.like]
    return kind.spec(form.shape(shapes))

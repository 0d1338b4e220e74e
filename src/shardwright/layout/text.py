"""The text of a layout and back: `f32[8@(tp, dp), 16] {cp: Partial(sum)}`.

Sizes are logical. `8@tp` is a plain cut of that dim by that axis, `8@(tp, dp)` by tp first. Placements that
are not a plain cut of one dim stand in the braces by axis; axes not named hold everything. What the defaults
do not say follows: `order(tp, dp)` and `stride(1, 8)`.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwright.errors import LayoutError, MeshError
from shardwright.index.stride import contiguous_stride
from shardwright.layout.arrangement import conflicts
from shardwright.layout.dtypes import dtype_name, dtype_of
from shardwright.placement.base import Placement
from shardwright.placement.shard import Shard

if TYPE_CHECKING:
    import torch

    from shardwright.layout.layout import Layout
    from shardwright.layout.mesh_shape import MeshShape


def format_layout(layout: Layout) -> str:
    """The text of a layout; it parses back on the same mesh."""
    cuts: list[list[str]] = [[] for _ in layout.shape]
    others = []
    for axis in layout.order:
        dim = plain_cut(layout.placements[axis])
        if dim is not None:
            cuts[dim].append(layout.axes[axis])
    for axis, placement in enumerate(layout.placements):
        if plain_cut(placement) is None and not placement.is_replicated:
            others.append(f"{layout.axes[axis]}: {placement.text()}")
    dims = ", ".join(_dim(size, names) for size, names in zip(layout.shape, cuts, strict=True))
    braces = f" {{{', '.join(others)}}}" if others else ""
    return f"{dtype_name(layout.dtype)}[{dims}]{braces}{_extras(layout, cuts)}"


def plain_cut(placement: Placement) -> int | None:
    """The dim that a placement cuts in consecutive chunks; None for any other placement."""
    dim: int | None = getattr(placement, "dim", None)
    return dim if dim is not None and placement == Shard(dim) else None


def _dim(size: int, names: list[str]) -> str:
    if not names:
        return str(size)
    return f"{size}@{names[0]}" if len(names) == 1 else f"{size}@({', '.join(names)})"


def _extras(layout: Layout, cuts: list[list[str]]) -> str:
    order = stride = ""
    implied = _implied_order(layout.mesh_shape, cuts)
    if layout.with_placements(layout.placements, implied).order != layout.order:
        order = f" order({', '.join(_ordered(layout))})"
    if layout.stride != contiguous_stride(layout.shape):
        stride = f" stride({', '.join(map(str, layout.stride))})"
    return order + stride


def _ordered(layout: Layout) -> list[str]:
    """The axes whose order matters, in order."""
    pairs = conflicts(layout.placements, layout.sizes, layout.shape)
    return [layout.axes[axis] for axis in layout.order if any(axis in pair for pair in pairs)]


def _implied_order(mesh: MeshShape, cuts: list[list[str]]) -> tuple[str, ...]:
    """Axes left to right, except that those which cut one dim are in the order in which it names them."""
    order = list(mesh.axes)
    for names in cuts:
        places = sorted(order.index(name) for name in names)
        for place, name in zip(places, names, strict=True):
            order[place] = name
    return tuple(order)


_TEXT = re.compile(
    r"\s*(?P<dtype>\w+)\s*\[(?P<dims>[^\]]*)\]\s*(\{(?P<braces>.*)\})?"
    r"\s*(order\((?P<order>[^)]*)\))?\s*(stride\((?P<stride>[^)]*)\))?\s*"
)
_SIZE = re.compile(r"(?P<size>\d+)(@(?P<one>\w+)|@\((?P<many>[^)]*)\))?")


class Parsed(NamedTuple):
    """What a text says: the arguments of a layout."""

    placements: dict[str, Placement]
    shape: list[int]
    dtype: torch.dtype
    stride: list[int] | None
    order: tuple[str, ...]


def parse_layout(text: object, mesh: MeshShape) -> Parsed:
    """The arguments of the layout that a text says, for this mesh.

    Raises: LayoutError: the text is not a layout's, or names an axis that the mesh has not.
    """
    if not isinstance(text, str) or (match := _TEXT.fullmatch(text)) is None:
        raise LayoutError(f"{text!r} is not a layout's text, such as 'f32[8@dp, 16] {{tp: Partial(sum)}}'")
    shape, cuts = _parse_dims(match["dims"], text)
    placements: dict[str, Placement] = {}
    for dim, names in enumerate(cuts):
        for name in names:
            _place(placements, name, Shard(dim), mesh, text)
    for name, placement in _parse_braces(match["braces"] or "", text):
        _place(placements, name, placement, mesh, text)
    stride = None if match["stride"] is None else [int(part) for part in _names(match["stride"])]
    order = _implied_order(mesh, cuts) if match["order"] is None else tuple(_names(match["order"]))
    return Parsed(placements, shape, dtype_of(match["dtype"]), stride, order)


def _place(known: dict[str, Placement], axis: str, placement: Placement, mesh: MeshShape, text: str) -> None:
    if axis in known:
        raise LayoutError(f"{text!r} places axis {axis} twice; an axis has one placement")
    if axis not in mesh.axes:
        raise MeshError(f"{text!r} names the axis {axis!r}; the mesh has {', '.join(mesh.axes)}")
    known[axis] = placement


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def between_commas(text: str) -> list[str]:
    """The parts between the commas that no bracket encloses."""
    parts, depth, start = [], 0, 0
    for position, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]]


def _split(text: str) -> list[str]:
    return [part.strip() for part in between_commas(text) if part.strip()]


def _parse_dims(text: str, whole: str) -> tuple[list[int], list[list[str]]]:
    shape, cuts = [], []
    for part in _split(text):
        match = _SIZE.fullmatch(part)
        if match is None:
            raise LayoutError(f"{whole!r}: {part!r} is not a size such as 8, 8@dp or 8@(tp, dp)")
        shape.append(int(match["size"]))
        cuts.append([match["one"]] if match["one"] else _names(match["many"] or ""))
    if max(prod(shape), *shape, 0) > sys.maxsize:
        raise LayoutError(f"{whole!r} has more elements than any tensor can have")
    return shape, cuts


def _parse_braces(text: str, whole: str) -> list[tuple[str, Placement]]:
    out = []
    for part in _split(text):
        axis, colon, call = part.partition(":")
        if not colon:
            raise LayoutError(f"{whole!r}: {part!r} is not 'axis: Placement(...)'")
        out.append((axis.strip(), parse_placement(call.strip())))
    return out


def parse_placement(text: str) -> Placement:
    """The placement that a call such as `Interleaved(0, 2)` or `Partial(sum)` names; no code is run.

    Raises: LayoutError: no imported placement class has this name, or several have, or an argument is not a
        literal.
    """
    try:
        return _made(ast.parse(text, mode="eval").body)
    except LayoutError:
        raise
    except (SyntaxError, ValueError):
        raise LayoutError(f"{text!r} is not a placement such as Interleaved(0, 2)") from None


def _made(node: ast.expr) -> Placement:
    name, arguments, named = _call(node)
    cls = _class_named(name)
    signature = inspect.signature(cls)
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        said = f"{error}, of {name}({', '.join(signature.parameters)})"
        raise LayoutError(f"{ast.unparse(node)} is no placement: {said}") from None
    placement: Placement = cls(*arguments, **named)
    return placement


def _call(node: ast.expr) -> tuple[str, list[Any], dict[str, Any]]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        named = {keyword.arg or "": _literal(keyword.value) for keyword in node.keywords}
        return node.func.id, [_literal(argument) for argument in node.args], named
    raise SyntaxError("not a call of a name")


def _literal(node: ast.expr) -> Any:
    """A literal; a name stands for itself, a call for a placement, also inside a tuple."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Call):
        return _nested(node)
    if isinstance(node, ast.Tuple):
        return tuple(map(_literal, node.elts))
    return ast.literal_eval(node)


def _nested(node: ast.expr) -> Placement:
    """A placement inside another one; a call of anything else is no literal."""
    try:
        return _made(node)
    except LayoutError:
        raise SyntaxError("neither a literal nor a placement") from None


def _class_named(name: str) -> type[Placement]:
    found = [cls for cls in _subclasses(Placement) if cls.__name__ == name]
    if not found:
        raise LayoutError(f"no placement class is called {name!r}; import the module that defines it first")
    homes = sorted({f"{cls.__module__}.{cls.__qualname__}" for cls in found})
    if len(homes) > 1:
        raise LayoutError(f"{name!r} may be {' or '.join(homes)}: give them different names")
    return found[-1]  # the newest, where one class was defined anew


def _subclasses(cls: type[Placement]) -> list[type[Placement]]:
    return [sub for direct in cls.__subclasses__() for sub in (direct, *_subclasses(direct))]

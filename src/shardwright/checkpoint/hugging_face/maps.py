"""How tensors of a file are those of a model: renamed, transposed, split, joined, stacked.

A map says, for one tensor of the model, which tensors it is made of. Maps compose, the output of one being
the input of the next, and each can be read both ways, since every element has one place on both sides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from shardwright.checkpoint.storage.proof import why_not_once
from shardwright.errors import CheckpointError, as_several, refuse_no_number, refuse_other_kind

Shape = tuple[int, ...]


class Link(NamedTuple):
    """A box of a tensor that is another tensor, named `source`, or a box of it.

    Args: offset, size: the box. dims: for each dim of the source, the dim of the tensor that it is.
        within: where the box begins in the source, and the shape of that; None: it is all of the source.
        step: how far apart neighbours in the box are in the source, for each of its dims, which that divides;
            None: they are neighbours there too.
    """

    source: str
    offset: Shape
    size: Shape
    dims: tuple[int, ...]
    within: tuple[Shape, Shape] | None = None
    step: Shape | None = None

    @property
    def shape(self) -> Shape:
        """Of the box in the source."""
        return tuple(self.size[dim] for dim in self.dims)

    @property
    def start(self) -> Shape:
        """Where the box begins in the source."""
        return (0,) * len(self.dims) if self.within is None else self.within[0]

    @property
    def whole(self) -> Shape:
        """The shape of the source."""
        return self.shape if self.within is None else self.within[1]

    @property
    def steps(self) -> Shape:
        """The step along each dim of the source."""
        return (1,) * len(self.dims) if self.step is None else self.step


Map = Callable[[str, Shape], Sequence[Link] | None]


@dataclass(frozen=True)
class _Named:
    """A map of the tensors whose whole name fits a regular expression."""

    pattern: str

    def __post_init__(self) -> None:
        """Raises: CheckpointError: the pattern, or a name that is made with it, is none."""
        self._refuse_wrong(())

    def _refuse_wrong(self, templates: tuple[str, ...]) -> None:
        for what in (self.pattern, *templates):
            refuse_other_kind(f"{self!r:.60}: a name", what, str, CheckpointError, fix="give texts")
        try:
            pattern = re.compile(self.pattern)
            for template in templates:
                pattern.sub(template, "")
        except (re.error, IndexError) as error:
            raise CheckpointError(f"{self} is no map: {error}") from None

    def _name(self, name: str, template: str) -> str | None:
        found = re.fullmatch(self.pattern, name)
        return found.expand(template) if found else None


@dataclass(frozen=True)
class rename(_Named):  # noqa: N801  it is used as a function
    r"""A tensor whose name fits `pattern` has the name `to` in the file: `rename(r"model\.(.*)", r"\1")`."""

    to: str

    def __post_init__(self) -> None:
        """As of every map."""
        self._refuse_wrong((self.to,))

    def __call__(self, name: str, shape: Shape) -> Sequence[Link] | None:
        """The tensor itself, renamed."""
        source = self._name(name, self.to)
        return None if source is None else [_whole(source, shape)]


@dataclass(frozen=True)
class transpose(_Named):  # noqa: N801
    """A matrix whose name fits `pattern` lies transposed in the file:  [a, b] -> [b, a]."""

    def __call__(self, name: str, shape: Shape) -> Sequence[Link] | None:
        """The matrix with its dims exchanged. Raises: CheckpointError: it is no matrix."""
        if self._name(name, "") is None:
            return None
        if len(shape) != 2:
            raise CheckpointError(f"{name} is {list(shape)}, and only a matrix can be transposed")
        return [Link(name, (0, 0), shape, (1, 0))]


@dataclass(frozen=True)
class join(_Named):  # noqa: N801
    """A tensor whose name fits `pattern` is `sources` one after another along `dim`: a fused q, k, v.

    Args: sizes: of each source along `dim`; None: all alike.
    """

    sources: tuple[str, ...]
    dim: int = 0
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """As of every map. Raises: CheckpointError: what says how they are joined does not."""
        fix = 'join("qkv", ("q", "k", "v"), dim=0, sizes=None)'
        sources = as_several("sources", self.sources, CheckpointError, fix=fix)
        sizes = as_several("sizes", () if self.sizes is None else self.sizes, CheckpointError, fix=fix)
        for number in sizes:
            refuse_no_number("a size", number, CheckpointError, whole=True)
        dim: object = self.dim
        if isinstance(dim, bool) or not isinstance(dim, int) or not sources:
            raise CheckpointError(f"{self} joins nothing, or along no dim\n  fix: {fix}")
        if self.sizes is not None and len(sizes) != len(sources):
            raise CheckpointError(f"{self} has {len(sources)} sources and {len(sizes)} sizes")
        self._refuse_wrong(sources)

    def __call__(self, name: str, shape: Shape) -> Sequence[Link] | None:
        """Each source. Raises: CheckpointError: the sizes do not add up."""
        if self._name(name, "") is None:
            return None
        if not -len(shape) <= self.dim < len(shape):
            raise CheckpointError(f"{name} is {list(shape)}, and {self} says no parts of that")
        whole, count = shape[self.dim], len(self.sources)
        sizes = self.sizes or (whole // count,) * count
        if sum(sizes) != whole or len(sizes) != count:
            raise CheckpointError(
                f"{name} has {whole} rows along dim {self.dim}, its {count} parts {list(sizes)}"
            )
        links, start = [], 0
        for template, size in zip(self.sources, sizes, strict=True):
            source = self._name(name, template)
            links.append(_cut(source or "", shape, self.dim, start, size))
            start += size
        return links


@dataclass(frozen=True)
class stack(_Named):  # noqa: N801
    """A tensor whose name fits `pattern` is a stack along dim 0 of tensors named `source` with `{index}`."""

    source: str

    def __post_init__(self) -> None:
        """As of every map. Raises: CheckpointError: all elements would be read from one tensor."""
        self._refuse_wrong((self.source,))
        if "{index}" not in self.source:
            raise CheckpointError(
                f"{self}: source names no {{index}}, which tells the tensors of a stack apart"
            )

    def __call__(self, name: str, shape: Shape) -> Sequence[Link] | None:
        """Each element of the stack: experts, layers."""
        source = self._name(name, self.source)
        if source is None:
            return None
        if not shape:
            raise CheckpointError(f"{name} is one element, and no stack of others")
        dims = tuple(range(1, len(shape)))
        links = (_cut(source.replace("{index}", str(at)), shape, 0, at, 1) for at in range(shape[0]))
        return [link._replace(dims=dims) for link in links]


def _whole(source: str, shape: Shape) -> Link:
    return Link(source, (0,) * len(shape), shape, tuple(range(len(shape))))


def _cut(source: str, shape: Shape, dim: int, start: int, size: int) -> Link:
    offset, sizes = [0] * len(shape), list(shape)
    offset[dim], sizes[dim] = start, size
    return Link(source, tuple(offset), tuple(sizes), tuple(range(len(shape))))


def listed(maps: Any) -> tuple[Map, ...]:
    """What `maps=` was given: several, or one alone."""
    several = isinstance(maps, Sequence) and not isinstance(maps, str) and not callable(maps)
    found: tuple[Map, ...] = tuple(maps) if several else (maps,)
    for one in found:
        if not callable(one):
            raise CheckpointError(
                f'maps={one!r:.60} is no map: rename, join, stack, transpose, a function, or "auto"'
            )
    return found


def links_of(name: str, shape: Shape, maps: Sequence[Map]) -> list[Link]:
    """What a tensor of the model is made of, after all maps in order.

    Raises: CheckpointError: the parts leave an element out, or hold one twice.
    """
    links = [_whole(name, shape)]
    for one in maps:
        links = [made for link in links for made in _through(link, one)]
    boxes = tuple((link.offset, link.size) for link in links)
    reason = why_not_once(shape, boxes) if prod(shape) else ""
    if any(n < 0 for box in boxes for side in box for n in side):
        reason = "a size or an offset is negative"
    if any(_leaves(link) for link in links):
        reason = "a box does not lie in its source"
    if reason:
        raise CheckpointError(f"the maps make {name} of parts that are not it: {reason}")
    return links


def _leaves(link: Link) -> bool:
    sides = zip(link.start, link.shape, link.whole, link.steps, strict=True)
    return any(
        k < 1 or most % k or at < 0 or at + n + max(n - 1, 0) * (k - 1) > most for at, n, most, k in sides
    )


def _through(link: Link, one: Map) -> list[Link]:
    inner: Any = one(link.source, link.whole)  # a function of the user's may give anything
    if inner is None:
        return [link]
    if not isinstance(inner, Sequence) or not all(isinstance(sub, Link) for sub in inner):
        raise CheckpointError(
            f"{one!r:.60}, a map of maps=, gives {inner!r:.60} for {link.source}: a map gives a list of "
            "`Link`, or None for what it leaves as it is"
        )
    return [made for sub in inner if (made := _composed(link, sub)) is not None]


def _composed(link: Link, sub: Link) -> Link | None:
    """The part of a link's tensor that a link of its source is; None: that is of another part."""
    if link.step is not None:
        raise CheckpointError(f"a map after one that reorders {link.source}: give one map that does both")
    low, high = list(sub.offset), [a + n for a, n in zip(sub.offset, sub.size, strict=True)]
    if link.within is not None:  # of a whole source nothing is cut off, so that a box beyond it is found
        low = [max(a, b) for a, b in zip(link.start, low, strict=True)]
        high = [min(a + n, b) for a, n, b in zip(link.start, link.shape, high, strict=True)]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
    offset, size = list(link.offset), list(link.size)
    for dim, start, a, b in zip(link.dims, link.start, low, high, strict=True):
        offset[dim], size[dim] = offset[dim] + a - start, b - a
    starts = zip(sub.dims, sub.start, sub.steps, strict=True)
    moved = tuple((low[dim] - sub.offset[dim]) * step + at for dim, at, step in starts)
    dims = tuple(link.dims[dim] for dim in sub.dims)
    made = Link(sub.source, tuple(offset), tuple(size), dims, (moved, sub.whole), sub.step)
    return made if made.shape != made.whole else made._replace(within=None)


def in_steps(link: Link, step: Shape) -> tuple[Shape, Shape] | None:
    """A link's box of its source, whose dims are each cut in two by a step:  [n] -> [n / step, step].

    None: there it is no box.
    """
    offset: list[int] = []
    size: list[int] = []
    for at, n, own, k in zip(link.start, link.shape, link.steps, step, strict=True):
        if own != k and (own != 1 or at % k or n % k):
            return None
        offset += (at // k, at % k)
        size += (n, 1) if own == k else (n // k, k)
    return tuple(offset), tuple(size)


def cut_by(shape: Shape, step: Shape) -> Shape:
    """A shape of which each dim is cut in two, as `in_steps` says."""
    return tuple(part for n, k in zip(shape, step, strict=True) for part in (n // k, k))

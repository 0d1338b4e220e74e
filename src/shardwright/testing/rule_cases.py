"""The cases that a rule is checked on: every label cut in several ways, pending values in random parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from shardwright.index.assemble import unravel
from shardwright.index.region import Box, Region, Shape
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import MeshShape
from shardwright.placement.base import Partition, Pending, Placement
from shardwright.placement.owner import Owner
from shardwright.placement.ragged import Ragged
from shardwright.placement.shard import Shard
from shardwright.remember import remembered
from shardwright.rules.call import Call
from shardwright.rules.candidates import REPLICATE, AxisView, Candidate, candidates, cut
from shardwright.rules.equation import BoundHom, Equation
from shardwright.rules.monoid import KEPT, has_meaning, pending_of
from shardwright.rules.states import States

_NAMED = ("sum", "max", "min")


@dataclass(frozen=True, repr=False)
class Scattered(Partition):
    """Indices of a dim dealt to the coords at random, in random order: no shape of cut may be assumed."""

    dim: int
    seed: int

    def region(self, shape: Shape, n: int, coord: int) -> Region:
        """One box per index."""
        own = _dealt(shape[self.dim], n, self.seed)[coord]
        local = (*shape[: self.dim], len(own), *shape[self.dim + 1 :])
        return Region(self._rows(shape, own), local)

    def _rows(self, shape: Shape, own: tuple[int, ...]) -> Iterator[Box]:
        """Local row-major order: the dims before `dim` are walked index by index."""
        outer = shape[: self.dim]
        for position in range(prod(outer)):
            at = unravel(position, outer)
            for index in own:
                rest = shape[self.dim + 1 :]
                offset = (*at, index, *[0] * len(rest))
                yield Box(offset, (*[1] * len(outer), 1, *rest))

    def on_dim(self, dim: int) -> Scattered:
        """The same deal of another dim."""
        return Scattered(dim, self.seed)

    def cut_dims(self, shape: Shape, n: int) -> tuple[int, ...]:  # noqa: ARG002  whatever the shape
        """`dim`."""
        return (self.dim,)

    def touched_dims(self, shape: Shape, n: int) -> tuple[int, ...]:  # noqa: ARG002  whatever the shape
        """`dim`."""
        return (self.dim,)

    def text(self) -> str:
        """Class and arguments."""
        return f"Scattered({self.dim}, seed={self.seed})"

    __repr__ = text


@remembered(4096)
def _dealt(size: int, n: int, seed: int) -> tuple[tuple[int, ...], ...]:
    generator = torch.Generator().manual_seed(seed * 1009 + size * 31 + n)
    owner = torch.randint(n, (size,), generator=generator).tolist()
    order = torch.randperm(size, generator=generator).tolist()
    return tuple(tuple(i for i in order if owner[i] == coord) for coord in range(n))


# A false fact may hold for some parts of a few elements.
_DRAWS = 3


def cases(equation: Equation, call: Call, n: int, generator: torch.Generator) -> Iterator[Candidate]:
    """All candidates of an equation on an axis of size n, over the families and beyond them."""
    view = _view(equation, call, n, (REPLICATE,) * len(equation.operands))
    for label in equation.cuttable:
        seed = int(torch.randint(1000, (1,), generator=generator))
        for part in cuts_of(n, equation.sizes[label], seed):
            yield from cut(view, label, part)
    for hom in equation.homs * _DRAWS:
        yield from _pending_cases(equation, call, n, hom)
    if equation.same_shape:
        yield from _element_cases(equation, call, n)


def cuts_of(n: int, size: int, seed: int) -> Iterator[Partition]:
    """Ways to cut a label: in chunks, unevenly with an empty first part, dealt at random, on one coord."""
    yield Shard(0)
    if n > 1 and size:
        yield Ragged((0, *range(1, n)), (0,))
        yield Ragged((*range(n, 0, -1),), (0,))
        yield Scattered(0, seed)


def _view(equation: Equation, call: Call, n: int, current: tuple[Placement, ...]) -> AxisView:
    return AxisView(equation, call, n, current, States(equation.sizes))


def _pending_cases(equation: Equation, call: Call, n: int, hom: BoundHom) -> Iterator[Candidate]:
    names = _NAMED if hom.fact.source in KEPT else (hom.fact.source,)
    for name in names:
        source = pending_of(name)
        if not all(speaks_of(source, call.operands[i].dtype) for i in hom.operands):
            continue
        current = tuple(source if i in hom.operands else REPLICATE for i in range(len(equation.operands)))
        for candidate in candidates(_view(equation, call, n, current)):
            if candidate.label is None and all(candidate.inputs[i] == source for i in hom.operands):
                yield candidate


def speaks_of(source: Pending, dtype: torch.dtype) -> bool:
    """Whether values of this dtype are pending so, in random parts: an integer has no random factors."""
    whole_numbers = not (dtype.is_floating_point or dtype.is_complex)
    return has_meaning(source, dtype) and not (whole_numbers and source.reduce_op == "product")


def _element_cases(equation: Equation, call: Call, n: int) -> Iterator[Candidate]:
    shapes = [slot.shape(equation.sizes) for slot in equation.operands]
    common = max(shapes, key=lambda shape: (prod(shape) != 1, len(shape)))
    if not common:
        return
    ways: list[Partition] = [Owner(n - 1)]
    if len(common) > 1:
        ways.append(Ragged((*range(1, n + 1),), tuple(range(len(common)))))
    for way in ways:
        current = tuple(way if shape == common else REPLICATE for shape in shapes)
        for candidate in candidates(_view(equation, call, n, current)):
            if candidate.scattered:
                yield candidate


def parts_of(layout: Layout, x: Tensor, n: int, generator: torch.Generator) -> list[Tensor]:
    """The local tensors of all coords; pending values in random parts."""
    placement = layout.placements[0]
    if placement.is_pending and n > 1:
        return random_parts(placement, x, n, generator)
    return [layout.split(x, (coord,)) for coord in range(n)]


def random_parts(placement: Placement, x: Tensor, n: int, generator: torch.Generator) -> list[Tensor]:
    """n tensors that combine to `x`, none of them special: a fact must hold for arbitrary parts."""
    op = getattr(placement, "reduce_op", "")
    if op in {"sum", "avg"}:
        scale = n if op == "avg" else 1
        noise = [_noise(x, generator) for _ in range(n - 1)]
        rest = x * scale - sum(noise, torch.zeros_like(x))
        return [*noise, rest]
    if op == "product":
        factors = [2.0 * _signs(x, generator) for _ in range(n - 1)]
        return [*factors, x / _product(factors, x)]
    if op in {"max", "min"}:
        return _random_owner(x, n, generator, sign=-1 if op == "max" else 1)
    if op == "norm2":
        return _random_length(x, n, generator)
    layout = Layout(MeshShape(("x",), (n,)), (placement,), x.shape, dtype=x.dtype, stride=x.stride())
    return [layout.split(x, (coord,)) for coord in range(n)]


def _signs(x: Tensor, generator: torch.Generator) -> Tensor:
    return (torch.randint(0, 2, x.shape, generator=generator) * 2 - 1).to(x.dtype)


def _product(factors: list[Tensor], like: Tensor) -> Tensor:
    """The product of all factors; ones if there are none."""
    out = torch.ones_like(like)
    for factor in factors:
        out = out * factor
    return out


def _noise(x: Tensor, generator: torch.Generator) -> Tensor:
    if x.dtype.is_floating_point or x.dtype.is_complex:
        return torch.randn(x.shape, dtype=x.dtype, generator=generator)
    return torch.randint(-4, 5, x.shape, generator=generator).to(x.dtype)


def _random_length(x: Tensor, n: int, generator: torch.Generator) -> list[Tensor]:
    """Terms whose squares add up; a value below 0 is a single term."""
    terms = torch.rand((n, *x.shape), dtype=x.dtype, generator=generator) + 0.1
    single = torch.randint(n, x.shape, generator=generator)
    shares = terms / torch.linalg.vector_norm(terms, dim=0)
    return [torch.where(x < 0, x * (single == coord), x * shares[coord]) for coord in range(n)]


def _random_owner(x: Tensor, n: int, generator: torch.Generator, *, sign: int) -> list[Tensor]:
    """The value on one coord per element, something smaller (or larger) on the others."""
    owner = torch.randint(n, x.shape, generator=generator)
    if x.dtype == torch.bool:
        other = torch.full_like(x, fill_value=sign > 0)
        return [torch.where(owner == coord, x, other) for coord in range(n)]
    if x.dtype.is_floating_point:
        far = [torch.rand(x.shape, dtype=x.dtype, generator=generator) * 3 * sign for _ in range(n)]
        return [torch.where(owner == coord, x, x + far[coord]) for coord in range(n)]
    offset = [torch.randint(0, 4, x.shape, generator=generator) * sign for _ in range(n)]
    return [torch.where(owner == coord, x, _moved(x, offset[coord])) for coord in range(n)]


def _moved(x: Tensor, offset: Tensor) -> Tensor:
    """`x + offset` of integers, which stop at the end of their range."""
    limits = torch.iinfo(x.dtype)
    below = x.clamp(max=limits.min + 4).long() - limits.min
    above = limits.max - x.clamp(min=limits.max - 4).long()
    return (x.long() + offset.clamp(-below, above)).to(x.dtype)

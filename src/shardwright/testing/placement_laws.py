"""The laws of placements, each a function that returns None or says what is broken, for one shape and axis.

They know no placement by name: what they compare with is counted element by element from the regions.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from math import prod

import numpy as np
import torch
from torch import Tensor

from shardwright.index.assemble import derived_cut_dims, take_region
from shardwright.index.region import Region, Shape
from shardwright.placement.base import Partition, Pending, Placement

# ------------------------------------------------------------------------------------------ partitions


def regions_fit(p: Partition, shape: Shape, n: int) -> str | None:
    """Each region lies inside the tensor and fills its local shape; the local tensor keeps its dims."""
    for coord in range(n):
        region = p.region(shape, n, coord)
        broken = _fits(region, shape)
        if broken:
            return f"coord {coord}: {broken}\n{_held(p, shape, n)}"
    return None


def _fits(region: object, shape: Shape) -> str | None:
    if not isinstance(region, Region):
        return f"region() gave {region!r}, not a Region"
    held = sum(box.numel for box in region.boxes)
    if held != prod(region.local_shape):
        return f"its boxes hold {held} elements, its local shape is {region.local_shape}"
    if len(region.local_shape) != len(shape) and not (shape == () and region.local_shape == (0,)):
        return f"its local shape {region.local_shape} has not {len(shape)} dims, as the tensor has"
    for box in region.boxes:
        if len(box.offset) != len(shape) or len(box.size) != len(shape):
            return f"{box} has not {len(shape)} dims"
        if any(o < 0 or s < 0 or o + s > end for o, s, end in zip(box.offset, box.size, shape, strict=True)):
            return f"{box} leaves the tensor"
    return None


def each_element_once(p: Partition, shape: Shape, n: int) -> str | None:
    """The regions of all coords cover the tensor and are disjoint."""
    held = np.zeros(shape, dtype=np.int64)
    for coord in range(n):
        for box in p.region(shape, n, coord).boxes:
            held[box.slices] += 1
    for wrong, words in ((held == 0, "by no coord"), (held > 1, "more than once")):
        if wrong.any():
            index = tuple(int(i) for i in np.argwhere(wrong)[0])
            return f"element {index} is held {words}\n{_held(p, shape, n)}"
    return None


def local_shape_is_the_regions(p: Partition, shape: Shape, n: int) -> str | None:
    """`local_shape` says what `region` says; so does `even`."""
    shapes = [p.region(shape, n, coord).local_shape for coord in range(n)]
    for coord, wanted in enumerate(shapes):
        given = p.local_shape(shape, n, coord)
        if given != wanted:
            return f"local_shape() of coord {coord} is {given}, its region's {wanted}"
    if p.even(shape, n) != (len(set(shapes)) == 1):
        return f"even() is {p.even(shape, n)}, the local shapes are {shapes}"
    return None


def split_is_the_region(p: Partition, shape: Shape, n: int) -> str | None:
    """`split` gives the elements of the region in its order, and `join` undoes it bit for bit."""
    x = _numbered(shape)
    parts = [p.split(x, n, coord) for coord in range(n)]
    for coord, part in enumerate(parts):
        wanted = take_region(x, p.region(shape, n, coord))
        if part.shape != wanted.shape or not torch.equal(part, wanted):
            return f"split() of coord {coord} is {part.tolist()}, its region holds {wanted.tolist()}"
    joined = p.join(parts, shape)
    if joined.shape != x.shape or not torch.equal(joined, x):
        return f"join(split(x)) is {joined.tolist()}, x is {x.tolist()}"
    return None


def cut_dims_are_the_regions(p: Partition, shape: Shape, n: int) -> str | None:
    """Along dims that are not in `cut_dims` every coord holds all indices in order, empty coords aside."""
    said, found = set(p.cut_dims(shape, n)), set(derived_cut_dims(p, shape, n))
    if not found <= said:
        return f"cut_dims() is {sorted(said)}, the regions cut {sorted(found)}\n{_held(p, shape, n)}"
    touched = set(p.touched_dims(shape, n))
    for coord in range(n):
        local = p.local_shape(shape, n, coord)
        changed = {dim for dim, size in enumerate(shape) if local[dim] != size}
        if not changed <= touched:
            return f"coord {coord} has local shape {local}, but touched_dims() is {sorted(touched)}"
    return None


def another_dim_is_the_same_split(p: Partition, shape: Shape, n: int) -> str | None:
    """`on_dim(d)` splits dim d as `p` splits its own: moving the dim and splitting may be swapped."""
    cut = p.cut_dims(shape, n)
    if len(cut) != 1 or p.on_dim(cut[0]) is None:
        return None
    x = _numbered(shape)
    for dim in range(len(shape)):
        moved = p.on_dim(dim)
        if moved is None:
            continue
        for coord in range(n):
            given = moved.split(x.movedim(cut[0], dim), n, coord)
            if not torch.equal(given, p.split(x, n, coord).movedim(cut[0], dim)):
                return f"on_dim({dim}) = {moved!r} does not split like {p!r} on coord {coord}"
    return None


def _held(p: Partition, shape: Shape, n: int) -> str:
    return "\n".join(f"  coord {coord} holds {p.region(shape, n, coord)!r}" for coord in range(n))


def _numbered(shape: Shape) -> Tensor:
    return torch.arange(prod(shape)).reshape(shape)


PARTITION_LAWS: tuple[Callable[[Partition, Shape, int], str | None], ...] = (
    regions_fit,
    each_element_once,
    local_shape_is_the_regions,
    split_is_the_region,
    cut_dims_are_the_regions,
    another_dim_is_the_same_split,
)

# -------------------------------------------------------------------------------------------- pendings


def samples(p: Pending, shape: Shape) -> Iterator[Tensor]:
    """Values of this shape in the domain of a Pending: floats of both signs and of one, integers, bools."""
    random = torch.Generator().manual_seed(prod(shape))
    x = torch.randn(shape, generator=random)
    for value in (x, x.abs(), x.double(), x.bfloat16(), (x * 8).long(), x > 0, torch.complex(x, x)):
        if p.in_domain(value):
            yield value


def combine_undoes_embed(p: Pending, shape: Shape, n: int) -> str | None:
    """`combine([embed(x, n, c) for c in range(n)]) == x` within `tolerance`, and `x` stays as it was."""
    for x in samples(p, shape):
        before = x.clone()
        terms = [p.embed(x, n, coord) for coord in range(n)]
        for coord, term in enumerate(terms):
            if term.shape != x.shape or term.dtype != x.dtype:
                return f"embed() of coord {coord} made {_kind(term)} of {_kind(x)}"
        value = p.combine(terms)
        if value.shape != x.shape or value.dtype != x.dtype:
            return f"combine() made {_kind(value)} of terms of {_kind(x)}"
        if not torch.equal(x, before):
            return "combine() or embed() changed its argument"
        if not close(value, x, p.tolerance):
            shown = "\n".join(f"  coord {c} holds {term.tolist()}" for c, term in enumerate(terms))
            return f"combine(embed(x)) is {value.tolist()}, x is {x.tolist()} ({x.dtype})\n{shown}"
    return None


def combine_is_elementwise(p: Pending, shape: Shape, n: int) -> str | None:
    """Reducing a part is the part of the reduced: what lets a Pending stand beside any Partition."""
    for x in samples(p, shape):
        terms = [p.embed(x, n, coord) for coord in range(n)]
        whole = p.combine(terms).reshape(-1)[::2]
        part = p.combine([term.reshape(-1)[::2] for term in terms])
        if not torch.equal(whole, part):
            return f"combine() of every other element is {part.tolist()}, of all elements {whole.tolist()}"
    return None


def identity_is_ignored(p: Pending, shape: Shape, n: int) -> str | None:  # noqa: ARG001 - two terms suffice
    """`combine([x, identity(x)]) == x`; a linear reduction has the identity 0."""
    for x in samples(p, shape):
        neutral = p.identity(x)
        if neutral is None:
            continue
        ignored = not neutral.any() if p.linear else close(p.combine([x, neutral]), x, p.tolerance)
        if not ignored:
            return f"identity(x) is {neutral.tolist()}: combine() does not ignore it beside {x.tolist()}"
    return None


def linear_means_linear(p: Pending, shape: Shape, n: int) -> str | None:
    """Where `linear` is said, `combine` of a sum is the sum, and of a multiple the multiple."""
    if not p.linear:
        return None
    random = torch.Generator().manual_seed(0)
    first = [torch.randn(shape, generator=random, dtype=torch.float64) for _ in range(n)]
    second = [torch.randn(shape, generator=random, dtype=torch.float64) for _ in range(n)]
    both = p.combine([3 * a - b for a, b in zip(first, second, strict=True)])
    wanted = 3 * p.combine(first) - p.combine(second)
    if not torch.allclose(both, wanted, rtol=1e-12, atol=1e-12):
        return f"combine() is not linear: {both.tolist()} for 3a - b, term by term {wanted.tolist()}"
    return None


def close(value: Tensor, x: Tensor, ulps: int) -> bool:
    """Equal up to this many units in the last place; the sign of zero does not count."""
    if not ulps or not (x.is_floating_point() or x.is_complex()):
        return torch.equal(value, x)
    if x.is_complex():
        value, x = torch.view_as_real(value), torch.view_as_real(x)
    unit = torch.finfo(x.dtype).eps * x.double().abs()
    return bool(((value.double() - x.double()).abs() <= ulps * unit).all())


def _kind(x: Tensor) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}"


PENDING_LAWS: tuple[Callable[[Pending, Shape, int], str | None], ...] = (
    combine_undoes_embed,
    combine_is_elementwise,
    identity_is_ignored,
    linear_means_linear,
)

# ------------------------------------------------------------------------------------------- every one


def is_a_value(p: Placement) -> str | None:
    """Frozen, hashable, equal to its copies, pickled by import, with a gradient's placement."""
    if type(p).__hash__ is None:
        return f"{type(p).__name__} cannot be hashed: declare it with @dataclass(frozen=True)"
    copies = {"its deep copy": copy.deepcopy(p)}
    if "<locals>" not in type(p).__qualname__:  # a class inside a function cannot be imported by anybody
        copies["its pickle"] = pickle.loads(pickle.dumps(p))
    for words, made in copies.items():
        if made != p or hash(made) != hash(p) or repr(made) != repr(p):
            return f"{words} is {made!r}, which is not equal to {p!r}"
    if not isinstance(p.dual(), Placement):
        return f"dual() is {p.dual()!r}, not a Placement"
    families = [p.is_partition, p.is_pending, p.is_replicated]
    if sum(families) != 1:
        return "it must belong to one of the three families: subclass Partition or Pending"
    return None

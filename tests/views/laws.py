"""The law of views on random layouts and chains of views; the reference is torch on numbered elements."""

from __future__ import annotations

import random
from collections import Counter
from math import prod

import torch

from shardwright.index.view import (
    diagonal,
    expanded,
    identity,
    permuted,
    reshaped,
    selected,
    sliced,
    unfolded,
)
from shardwright.layout import Layout, MeshShape
from shardwright.placement import (
    BlockCyclic,
    Flat,
    Interleaved,
    Owner,
    Pending,
    Ragged,
    Replicate,
    Shard,
    Together,
    ZigZag,
)
from shardwright.views.local import local_view
from shardwright.views.through import through
from tests.laws.draws import kinds

MESHES = ((1,), (2,), (3,), (5,), (2, 2), (2, 3), (2, 2, 2))
SIZES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12)


class Draw:
    """Random layouts and views, from one seed."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def partition(self, ndim, n):
        """Any shipped partition."""
        if not ndim:
            return Owner(self.random.randrange(n))
        dim = self.random.randrange(ndim)
        makers = [
            lambda: Shard(dim),
            lambda: Shard(dim),
            lambda: Interleaved(dim, self.random.randint(1, 4)),
            lambda: ZigZag(dim),
            lambda: BlockCyclic(dim, self.random.randint(1, 3)),
            lambda: Owner(self.random.randrange(n)),
            lambda: self._ragged(ndim, n),
        ]
        return self.random.choice(makers)()

    def any_kind(self, shape, n):
        """Any placement that is finished, those that views make among them.

        Only plans within a graph put coords together, and a flattening of one dim has a plain name.
        """
        found = [p for p in kinds(self.random, numbered(shape), n) if not isinstance(p, Pending | Together)]
        return self.random.choice([p for p in found if not (isinstance(p, Flat) and len(p.dims) == 1)])

    def _ragged(self, ndim, n):
        units = [self.random.randint(0, 3) for _ in range(n)]
        dims = sorted(self.random.sample(range(ndim), self.random.randint(1, ndim)))
        return Ragged(units if any(units) else [1] * n, dims)

    def layout(self):
        """A small tensor on a small mesh, its axes applied in any order."""
        sizes = self.random.choice(MESHES)
        mesh = MeshShape(("a", "b", "c")[: len(sizes)], sizes)
        ndim = self.random.randint(0, 3)
        shape = tuple(max(self.random.choice(SIZES), int(self.random.random() < 0.9)) for _ in range(ndim))
        while prod(shape) > 400:
            shape = tuple(size // 2 for size in shape)
        made = self.random.random() < 0.3
        placements = [
            self.any_kind(shape, n)
            if made
            else self.partition(ndim, n)
            if self.random.random() < 0.85
            else Replicate()
            for n in sizes
        ]
        order = self.random.sample(mesh.axes, len(sizes))
        return Layout(mesh, placements, shape, dtype=torch.int64, order=order)

    def view(self, x):
        """A view, and what torch's view of `x` is."""
        shape, ndim = tuple(x.shape), x.dim()
        kinds = ["reshape", "permute", "expand"]
        kinds += ["slice", "slice", "select", "unfold"] if ndim else []
        kind = self.random.choice([*kinds, "diagonal"] if ndim > 1 else kinds)
        dim = self.random.randrange(ndim) if ndim else 0
        made = getattr(self, f"_{kind}")(x, shape, dim)
        return (identity(shape), x) if made is None else made

    def _reshape(self, x, shape, _):
        if not x.numel():
            return None
        target, left = [], x.numel()
        while left > 1 and self.random.random() < 0.7:
            factor = self.random.choice([d for d in range(1, left + 1) if left % d == 0])
            target.append(factor)
            left //= factor
        return reshaped(shape, (*target, left)), x.reshape(*target, left)

    def _permute(self, x, shape, _):
        dims = tuple(self.random.sample(range(len(shape)), len(shape)))
        return permuted(shape, dims), x.permute(dims)

    def _expand(self, x, shape, _):
        target = tuple(3 if size == 1 and self.random.random() < 0.5 else size for size in shape)
        target = (2, *target) if self.random.random() < 0.3 else target
        return expanded(shape, target), x.expand(target)

    def _slice(self, x, shape, dim):
        start, step = self.random.randint(0, shape[dim]), self.random.choice([1, 1, 2, 3])
        index = (slice(None),) * dim + (slice(start, self.random.randint(start, shape[dim]), step),)
        return sliced(shape, dim, start, step, x[index].shape[dim]), x[index]

    def _select(self, x, shape, dim):
        if not shape[dim]:
            return None
        index = self.random.randrange(shape[dim])
        return selected(shape, dim, index), x.select(dim, index)

    def _unfold(self, x, shape, dim):
        if not shape[dim]:
            return None
        size, step = self.random.randint(1, shape[dim]), self.random.randint(1, 4)
        return unfolded(shape, dim, size, step), x.unfold(dim, size, step)

    def _diagonal(self, x, shape, _):
        one, two = self.random.sample(range(len(shape)), 2)
        offset = self.random.randint(-2, 3)
        if offset >= shape[two] or -offset >= shape[one]:
            return None
        seen = x.diagonal(offset, one, two)
        return diagonal(shape, offset, one, two, seen.shape[-1]), seen


def numbered(shape):
    """All elements different."""
    return torch.arange(prod(shape)).reshape(shape)


def check_view(layout, view, seen, counts, see=through):
    """The law for one view: `seen` is what torch's view of the numbered tensor is. Returns the new layout."""
    full = numbered(layout.shape)
    new = see(layout, view, layout.dtype, tuple(torch.empty(view.target).stride()))
    parts = []
    for rank in layout.ranks:
        coords = layout.coords_of(rank)
        held = layout.split(full, coords).clone(memory_format=torch.contiguous_format)
        part = new.split(seen, coords)
        parts.append(part)
        assert tuple(part.shape) == new.local_shape(coords)
        stay = set(held.reshape(-1).tolist()) & set(seen.reshape(-1).tolist())
        assert set(part.reshape(-1).tolist()) == stay, "an element moved"
        check_local(local_view(layout, new, view, coords), held, part, counts)
    assert torch.equal(new.join(parts), seen)
    assert Layout.parse(str(new), new.mesh_shape) == new
    counts.update(type(p).__name__ for p in new.placements)
    counts["views"] += 1
    return new


def check_local(local, held, part, counts):
    """What the view is of one local tensor: taken, written through, and put back into zeros."""
    taken, copied = local.take(held)
    assert torch.equal(taken, part)
    counts["copied" if copied else "aliased"] += 1
    if not copied and taken.numel():
        assert taken.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
    times = Counter(part.reshape(-1).tolist())
    many = torch.tensor([times[value] for value in held.reshape(-1).tolist()]).reshape(held.shape)
    assert torch.equal(local.embed(torch.ones_like(taken), tuple(held.shape)), many.to(held.dtype))
    if not local.overlaps:
        written = held.clone()
        local.put(written, -1 - part)
        assert torch.equal(written, torch.where(many > 0, -1 - held, held))


def run(seed, cases, counts=None):
    """Random layouts, each under a chain of one to three views."""
    draw = Draw(seed)
    counts = Counter() if counts is None else counts
    for case in range(cases):
        layout = first = draw.layout()
        for _ in range(draw.random.randint(1, 3)):
            view, seen = draw.view(numbered(layout.shape))
            try:
                layout = check_view(layout, view, seen, counts)
            except Exception as error:
                scene = f"case {case} of seed {seed}: {first} .. {layout}, {view}"
                raise AssertionError(f"{scene}: {error}") from error
        counts["cases"] += 1
    return counts

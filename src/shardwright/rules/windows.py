"""Ops that slide a window along dims (convolutions, pooling): who needs which rows of a cut dim. Pure.

Where an axis cuts such a dim in intervals, a coord that makes some rows of the result needs the rows of the
operand that their windows see: its own and a border, the halo. Only the border is exchanged; the rest of the
call is the op itself, on windows without padding along that dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

from shardwright.index.runs import intervals
from shardwright.layout.layout import Layout
from shardwright.placement.base import Partition, Placement, Replicate
from shardwright.placement.ragged import Ragged
from shardwright.placement.shard import Shard
from shardwright.remember import remembered
from shardwright.rules.call import Call
from shardwright.rules.monoid import pending_of
from shardwright.rules.price import layout_bytes
from shardwright.rules.propagate import propagate_one

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Sliding:
    """The windows along one dim: output row o sees input rows `o * stride - padding` and the next `extent`.

    Args:
        dim: of the operand and of the result.
        length: rows of the operand.
        made: rows of the result.
        extent: rows that a window spans, dilation included.
    """

    dim: int
    length: int
    made: int
    extent: int
    stride: int
    padding: int

    def window(self, rows: Interval) -> Interval:
        """The operand's rows that these rows of the result see; they may lie outside of the operand."""
        low, high = rows
        if low >= high:
            return 0, 0
        return low * self.stride - self.padding, (high - 1) * self.stride - self.padding + self.extent


@dataclass(frozen=True)
class Halo:
    """What the coords of one axis exchange along one dim.

    Args:
        axis: of the mesh.
        sliding: the windows.
        held: the operand's rows of every coord.
        rows: the result's rows of every coord.
        placement: of the result on this axis.
    """

    axis: int
    sliding: Sliding
    held: tuple[Interval, ...]
    rows: tuple[Interval, ...]
    placement: Placement
    seen: tuple[Interval, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seen", tuple(self.sliding.window(rows) for rows in self.rows))

    def wanted(self, coord: int) -> Interval:
        """The rows of the operand that the windows of a coord see."""
        return _common(self.seen[coord], (0, self.sliding.length))

    def between(self, holder: int, reader: int) -> Interval:
        """The rows that the reader needs and the holder holds."""
        return _common(self.held[holder], self.wanted(reader))

    def rows_sent(self, holder: int) -> int:
        """How many rows a coord sends to others."""
        readers = (reader for reader in range(len(self.held)) if reader != holder)
        return sum(high - low for low, high in (self.between(holder, reader) for reader in readers))

    @property
    def most_rows_sent(self) -> int:
        """What the busiest coord sends."""
        return max(self.rows_sent(coord) for coord in range(len(self.held)))


def _common(left: Interval, right: Interval) -> Interval:
    low, high = max(left[0], right[0]), min(left[1], right[1])
    return (low, high) if low < high else (0, 0)


@dataclass(frozen=True, slots=True)
class SlidingOp:
    """One op that slides windows.

    Args:
        image: the operand that the windows slide over.
        like_result: operands that are placed like the result (gradients, indices).
        slides: the windows of a call along each spatial dim.
        to_image: the results that are placed like the image (a gradient of it); others are placed like the
            result of the forward op.
        sums: results that are a sum over all windows.
    """

    image: str
    slides: Callable[[Call], tuple[Sliding, ...] | None]
    like_result: tuple[str, ...] = ()
    to_image: tuple[int, ...] = ()
    sums: tuple[int, ...] = ()


@dataclass(frozen=True)
class WindowPlan:
    """How to run a call on windows.

    Args:
        inputs: the layout that each tensor operand must have before the exchange.
        outputs: the layouts of the results.
        halos: the exchanges, one per cut dim.
        slides: the windows along all spatial dims.
        overrides: local arguments that differ, as a rule gives them.
        bytes: that a rank sends, about.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout | None, ...]
    halos: tuple[Halo, ...]
    slides: tuple[Sliding, ...]
    overrides: tuple[tuple[str, Any], ...]
    bytes: int


def plan_windows(op: SlidingOp, call: Call, layouts: Sequence[Layout]) -> WindowPlan | None:
    """The plan for a call, or None where no axis cuts a dim that windows slide along, or not in intervals."""
    names = tuple(operand.name for operand in call.flat_operands)
    if op.image not in names:
        return None
    slides = op.slides(call)
    halos = None if slides is None else _halos(slides, layouts[names.index(op.image)])
    if slides is None or not halos:
        return None
    return _planned(op, call, tuple(layouts), names, slides, halos)


def _halos(slides: tuple[Sliding, ...], image: Layout) -> tuple[Halo, ...] | None:
    """One exchange per cut dim; None where a dim is cut twice or not in intervals."""
    by_dim = {sliding.dim: sliding for sliding in slides}
    found: list[Halo] = []
    for axis, (placement, n) in enumerate(zip(image.placements, image.sizes, strict=True)):
        if n == 1 or not isinstance(placement, Partition):
            continue
        cut = placement.cut_dims(image.shape, n)
        if not set(cut) & set(by_dim):
            continue
        held = held_intervals(placement, image.shape, cut[0], n) if len(cut) == 1 else None
        if held is None or cut[0] not in by_dim:
            return None
        sliding = by_dim.pop(cut[0])
        rows, made = _rows_made(sliding, placement, held)
        found.append(Halo(axis, sliding, held, rows, made))
    return tuple(found)


@remembered(1024)
def held_intervals(
    placement: Partition, shape: tuple[int, ...], dim: int, n: int
) -> tuple[Interval, ...] | None:
    """The rows of `dim` that each coord holds if they are intervals in the order of the coords, else None."""
    found, end = [], 0
    for coord in range(n):
        region = placement.region(shape, n, coord)
        if region.runs is None:
            if region.numel or 0 in shape[:dim] + shape[dim + 1 :]:
                return None
            pieces = []
        else:
            pieces = list(intervals(region.runs[dim]))
        if len(pieces) > 1 or (pieces and pieces[0][0] != end):
            return None
        size = pieces[0][1] if pieces else 0
        found.append((end, end + size))
        end += size
    return tuple(found) if end == shape[dim] else None


def _rows_made(
    sliding: Sliding, placement: Partition, held: tuple[Interval, ...]
) -> tuple[tuple[Interval, ...], Placement]:
    """Who makes which rows: cut as the operand if it is cut evenly, else where the windows' centres lie."""
    plain = Shard(sliding.dim)
    n = len(held)
    if placement == plain:
        return _as_intervals(sliding, n), plain
    before = sliding.padding - (sliding.extent - 1) // 2
    bounds = [0]
    for _, end in held[:-1]:
        bound = -(-(end + before) // sliding.stride)
        bounds.append(min(max(bound, bounds[-1]), sliding.made))
    bounds.append(sliding.made)
    rows = tuple(pairwise(bounds))
    if rows == _as_intervals(sliding, n):
        return rows, plain
    return rows, Ragged(tuple(high - low for low, high in rows), dims=(sliding.dim,))


def _as_intervals(sliding: Sliding, n: int) -> tuple[Interval, ...]:
    """The rows that a plain cut gives each coord."""
    ends = [0]
    for coord in range(n):
        ends.append(ends[-1] + Shard(0).local_shape((sliding.made,), n, coord)[0])
    return tuple(pairwise(ends))


def _planned(
    op: SlidingOp,
    call: Call,
    layouts: tuple[Layout, ...],
    names: tuple[str, ...],
    slides: tuple[Sliding, ...],
    halos: tuple[Halo, ...],
) -> WindowPlan | None:
    """The other axes as a rule has them, as if the axes of the halos held everything."""
    axes = {halo.axis: halo for halo in halos}
    image = layouts[names.index(op.image)]
    bare = tuple(layout.with_placements(dict.fromkeys(axes, Replicate())) for layout in layouts)
    decision = propagate_one(call, bare)
    if any(_cuts_spatial(decision.inputs[i], slides) for i, name in enumerate(names) if name == op.image):
        return None
    kept = {axis: image.placements[axis] for axis in axes}
    made = {axis: halo.placement for axis, halo in axes.items()}
    whole: dict[int, Placement] = dict.fromkeys(axes, Replicate())
    by_name = {op.image: kept, **dict.fromkeys(op.like_result, made)}
    inputs = tuple(
        layout.with_placements(by_name.get(name, whole))
        for name, layout in zip(names, decision.inputs, strict=True)
    )
    sums: dict[int, Placement] = dict.fromkeys(axes, pending_of("sum"))
    by_index = {**dict.fromkeys(op.sums, sums), **dict.fromkeys(op.to_image, kept)}
    outputs = tuple(
        None if out is None else out.with_placements(by_index.get(i, made))
        for i, out in enumerate(decision.outputs)
    )
    moved = sum(layout_bytes(have, want) for have, want in zip(layouts, inputs, strict=True))
    sent = _halo_bytes(inputs[names.index(op.image)], halos) * (2 if op.to_image else 1)
    return WindowPlan(inputs, outputs, halos, slides, decision.overrides, moved + sent)


def _cuts_spatial(layout: Layout, slides: tuple[Sliding, ...]) -> bool:
    dims = {sliding.dim for sliding in slides}
    for placement, n in zip(layout.placements, layout.sizes, strict=True):
        if n > 1 and isinstance(placement, Partition) and dims & set(placement.cut_dims(layout.shape, n)):
            return True
    return False


def _halo_bytes(image: Layout, halos: tuple[Halo, ...]) -> int:
    """What the busiest rank sends, about: each exchange sees what the other axes have cut."""
    total = 0
    for halo in halos:
        others = [
            n
            for axis, (p, n) in enumerate(zip(image.placements, image.sizes, strict=True))
            if axis != halo.axis and p.is_partition
        ]
        row = image.numel // max(1, halo.sliding.length) // max(1, prod(others)) * image.itemsize
        total += row * halo.most_rows_sent
    return total

"""Parts laid end to end along a dim: the layout of the whole that leaves every element where it is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from shardwright.errors import LayoutError, PlacementError
from shardwright.index.runs import Run, Runs, merged
from shardwright.layout.applied import cut_form
from shardwright.layout.layout import Layout
from shardwright.placement.base import Partition, Placement
from shardwright.placement.fused import Fused
from shardwright.placement.one_dim import held, same_runs
from shardwright.placement.owner import Owner
from shardwright.remember import remembered
from shardwright.views.names import named, on_dims


@remembered(4096)
def end_to_end(parts: tuple[Layout, ...], dim: int) -> Layout | None:
    """The layout of `torch.cat(parts, dim)`, in which each coord has what it holds of the parts.

    What is whole on an axis that cuts others is taken to be cut too, which sends nothing: a short part at
    an end is of the coord there, so that the cut stays in one piece; any other is cut as its neighbours.
    None where an axis that cuts the dim leaves no layout that has a name.
    """
    shape = tuple(sum(x.shape[at] for x in parts) if at == dim else n for at, n in enumerate(parts[0].shape))
    placements = [_placed(parts, dim, axis) for axis in range(len(parts[0].sizes))]
    if None in placements:
        return None
    order = max(parts, key=lambda x: len(x.partitions)).order_names
    with suppress(LayoutError, PlacementError):
        return Layout(parts[0].mesh_shape, placements, shape, dtype=parts[0].dtype, order=order)
    return None


def _placed(parts: Sequence[Layout], dim: int, axis: int) -> Placement | None:
    """What the axis does to the whole; None where that has no name."""
    have = [part.placements[axis] for part in parts]
    cuts = dict.fromkeys(placement for placement in have if not placement.is_replicated)
    if not cuts:
        return have[0]
    if not all(isinstance(placement, Partition) for placement in cuts):
        return None
    forms = [None if part.placements[axis].is_replicated else _form(part, axis) for part in parts]
    cut = [form for form, placement in zip(forms, have, strict=True) if not placement.is_replicated]
    if any(form is None or form[0] not in {None, dim} for form in cut):
        return next(iter(cuts)) if len(cuts) == 1 else None
    lengths, n = [part.shape[dim] for part in parts], parts[0].sizes[axis]
    flat = _named(_with_whole([None if f is None else f[1] for f in forms], lengths, n), lengths, n)
    return None if flat is None else on_dims(flat, (dim,))


def _form(part: Layout, axis: int) -> tuple[int | None, Partition] | None:
    """The dim that an axis cuts, None for one coord that has everything, and the cut of a 1-d tensor."""
    placement = part.placements[axis]
    if isinstance(placement, Partition) and not placement.cut_dims(part.shape, part.sizes[axis]):
        one = placement.on_dim(0)
        return None if one is None else (None, one)
    return cut_form(part, axis)


def _with_whole(flat: list[Partition | None], lengths: Sequence[int], n: int) -> list[Partition]:
    """The cut of each part, those that are whole included."""
    cuts = [(cut, size) for cut, size in zip(flat, lengths, strict=True) if cut is not None]
    like, longest = max(cuts, key=lambda entry: entry[1])
    ends: dict[int, Partition] = {0: Owner(0), len(flat) - 1: Owner(n - 1)}
    whole = (ends.get(at, like) if size * n <= longest else like for at, size in enumerate(lengths))
    return [cut or instead for cut, instead in zip(flat, whole, strict=True)]


def _named(cuts: Sequence[Partition], lengths: Sequence[int], n: int) -> Partition | None:
    def held_by(coord: int) -> Runs:
        start, runs = 0, []
        for cut, size in zip(cuts, lengths, strict=True):
            runs += [Run(r.offset + start, r.size, r.stride, r.repeat) for r in held(cut, size, n, coord)]
            start += size
        return merged(tuple(runs))

    found = named(held_by, sum(lengths), n)
    if found is None:
        found = Fused(0, [size for size in lengths if size])
        if not all(same_runs(held(found, sum(lengths), n, c), held_by(c)) for c in range(n)):
            return None
    return found

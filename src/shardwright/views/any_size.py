"""A reshape without its sizes: which dims become which, for every shape of the same kind.

A reshape falls into blocks: consecutive dims of the source that hold as many elements as consecutive dims of
the target. A block of one dim on each side may be cut in any way; a block whose first dim is cut into equal
consecutive chunks stays so if its first target dim divides too; any other block must be whole. Which blocks
there are is found for one shape; that they fit another is a product per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardwright.index.region import Shape
from shardwright.layout.kind import Kind
from shardwright.layout.layout import Layout
from shardwright.placement.base import Partition
from shardwright.placement.shard import Shard

_SAME = -1  # one dim that may be cut in any way
_WHOLE = 0  # dims that nothing cuts; else into how many chunks the first dim is cut


# Source dims [first, last), target dims [start, stop) that they become, in how many chunks the first is cut.
Block = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class ReshapeForm:
    """A reshape of tensors of one kind to tensors of another.

    blocks: all dims, in their order. target: the kind of the result.
    """

    blocks: tuple[Block, ...]
    target: Kind

    def target_shape(self, source: Shape, size: Sequence[int]) -> Shape | None:
        """The shape that `size` (one of them may be -1) asks for; None where the form does not say."""
        shape = tuple(size)
        if -1 in shape:
            numel, others = prod(source), -prod(shape)
            if others <= 0 or numel % others or shape.count(-1) > 1:
                return None
            shape = tuple([numel // others if n == -1 else n for n in shape])
        for first, last, start, stop, cut in self.blocks:
            if cut == _SAME:
                if source[first] != shape[start]:
                    return None
                continue
            sizes = shape[start:stop]
            if prod(source[first:last]) != prod(sizes) or (cut and (source[first] % cut or sizes[0] % cut)):
                return None
            for n, known in zip(sizes, self.target.classes[start:stop], strict=True):
                if n != known and (n < 2 or known < 2):
                    return None
        return shape

    def local_sizes(self, local: Sequence[int], target: Shape) -> tuple[int, ...]:
        """The sizes of the local call on a rank whose part has this local shape."""
        sizes = list(target)
        for first, _, start, _, cut in self.blocks:
            if cut == _SAME:
                sizes[start] = local[first]
            elif cut:
                sizes[start] //= cut
        return tuple(sizes)


def reshape_form(source: Layout, target: Layout) -> ReshapeForm | None:
    """What a reshape from one layout to another, which moves nothing, says of other sizes; None: nothing."""
    have, get = source.kind, target.kind
    if have is None or get is None or not (have.rows and get.rows) or source.order != target.order:
        return None
    if 0 in source.shape:
        return None
    blocks: list[Block] = []
    for first, last, start, stop in _blocks(source.shape, target.shape):
        cut = _cut(source, target, range(first, last), range(start, stop))
        if cut is None:
            return None
        blocks.append((first, last, start, stop, cut))
    return ReshapeForm(tuple(blocks), get) if _others_stay(source, target) else None


def _blocks(source: Shape, target: Shape) -> list[tuple[int, int, int, int]]:
    """The smallest blocks, from the left; dims of size 1 that are left over join the last."""
    found = []
    i = j = 0
    while i < len(source) and j < len(target):
        first, start = i, j
        have, want = source[i], target[j]
        i, j = i + 1, j + 1
        while have != want:
            if have < want:
                have, i = have * source[i], i + 1
            else:
                want, j = want * target[j], j + 1
        found.append((first, i, start, j))
    if i < len(source) or j < len(target):
        first, _, start, _ = found.pop() if found else (0, 0, 0, 0)
        found.append((first, len(source), start, len(target)))
    return found


def _cut(source: Layout, target: Layout, dims: range, onto: range) -> int | None:
    """How the dims of a block are cut: `Block.cut`; None where a form cannot say."""
    axes = [axis for axis, cuts in enumerate(_cut_dims(source)) if not set(dims).isdisjoint(cuts)]
    if not axes:
        return _WHOLE
    mapping = {dims[0]: onto[0]}
    for axis in axes:
        placement = source.placements[axis]
        if not isinstance(placement, Partition) or placement.on_dims(mapping) != target.placements[axis]:
            return None
    if len(dims) == len(onto) == 1:
        return _SAME
    chunks = prod(source.sizes[axis] for axis in axes)
    chunked = all(source.placements[axis] == Shard(dims[0]) for axis in axes)
    return chunks if chunked else None


def _others_stay(source: Layout, target: Layout) -> bool:
    """Whether the axes that cut nothing are what they were, and no placement cuts several dims."""
    return all(
        len(cuts) == 1 if cuts else have == get
        for cuts, have, get in zip(_cut_dims(source), source.placements, target.placements, strict=True)
    )


def _cut_dims(layout: Layout) -> list[tuple[int, ...]]:
    return [
        placement.cut_dims(layout.shape, n) if isinstance(placement, Partition) else ()
        for placement, n in zip(layout.placements, layout.sizes, strict=True)
    ]

"""The laws of partitions, each a function that returns None or says what is broken, for one shape and axis.

They know no placement by name. A partition means its regions: what else it says is compared with what
follows from these, element by element. `shardwright.testing.check_placement` tries all of them on many
shapes, `shardwright.placement.first_use` some where a class of somebody else's is first met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations, product
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import PlacementError
from shardwright.index.assemble import derived_cut_dims, take_region
from shardwright.index.compose import compose_regions
from shardwright.index.cover import no_partition
from shardwright.index.region import Region, Shape
from shardwright.index.runs import total
from shardwright.placement.along_dim import AlongDim
from shardwright.placement.base import Partition, Placement
from shardwright.placement.one_dim import held_along, same_runs
from shardwright.placement.one_dim_form import one_dim_form, placed_on
from shardwright.placement.owner import Owner
from shardwright.placement.ragged import Ragged
from shardwright.placement.shard import Shard


def _numbered(shape: Shape) -> Tensor:
    return torch.arange(prod(shape)).reshape(shape)


def regions_make_up_the_tensor(p: Partition, shape: Shape, n: int) -> str | None:
    """Regions lie inside, fill their local shapes, and hold each element once; as their boxes say it."""
    regions: list[Any] = [p.region(shape, n, coord) for coord in range(n)]
    boxes = [Region(r.boxes, r.local_shape) if isinstance(r, Region) else r for r in regions]
    broken = no_partition(boxes, shape)
    return broken and f"{broken}\n{_held(p, shape, n)}"


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


PARTITION_LAWS: tuple[Callable[[Partition, Shape, int], str | None], ...] = (
    regions_make_up_the_tensor,
    local_shape_is_the_regions,
    split_is_the_region,
    cut_dims_are_the_regions,
    another_dim_is_the_same_split,
)

# ------------------------------------------------------- what a class says beside its regions


def _locals(p: Partition, shape: Shape, n: int) -> list[list[int]]:
    """What each coord holds, from the regions alone."""
    x = _numbered(shape)
    return [take_region(x, p.region(shape, n, coord)).reshape(-1).tolist() for coord in range(n)]


def _elements(region: Region, shape: Shape) -> list[int]:
    return take_region(_numbered(shape), region).reshape(-1).tolist()


def on_dim_agrees_with_the_region(p: Partition, shape: Shape, n: int) -> str | None:
    """Where the regions cut one dim, `on_dim` says the same cut for every dim, or None."""
    if not shape or p.on_dim(0) is None:
        return None
    form = one_dim_form(p, shape, n)  # it raises where on_dim contradicts the region
    if form is not None:
        for dim in range(len(shape)):
            moved = (*(1 for _ in shape[:dim]), shape[form[0]], *(1 for _ in shape[dim + 1 :]))
            placed_on(form[1], dim, moved, n)
    cut = derived_cut_dims(p, shape, n)
    own = p.on_dim(cut[0]) if len(cut) == 1 else None
    if own is not None and _locals(own, shape, n) != _locals(p, shape, n):
        return f"on_dim({cut[0]}) is {own}, which is another cut of the very dim that {p} cuts"
    return None


def renumbered_dims_are_the_same_split(p: Partition, shape: Shape, n: int) -> str | None:
    """`on_dims` splits the dims where they have gone; dims that stay stay.

    A class that flattens dims is asked for orders that keep these in order.
    """
    if type(p).on_dims is Partition.on_dims:
        return None
    same = p.on_dims({dim: dim for dim in range(len(shape))})
    if _locals(same, shape, n) != _locals(p, shape, n):
        return f"on_dims() of every dim to itself is {same}, another split"
    group = p.flat_group() or derived_cut_dims(p, shape, n)
    x = _numbered(shape)
    for order in permutations(range(len(shape))):  # dim d goes to order[d]
        if [order[dim] for dim in group] != sorted(order[dim] for dim in group):
            continue
        moved = p.on_dims(dict(enumerate(order)))
        there = x.permute([order.index(dim) for dim in range(len(order))])
        for coord in range(n):
            given = take_region(there, moved.region(tuple(there.shape), n, coord)).reshape(-1).sort().values
            wanted = take_region(x, p.region(shape, n, coord)).reshape(-1).sort().values
            if not torch.equal(given, wanted):
                return f"on_dims({dict(enumerate(order))}) is {moved}: coord {coord} holds other elements"
    return None


def a_flat_group_is_one_dim(p: Partition, shape: Shape, n: int) -> str | None:
    """Of the dims that `flat_group` names the local tensor has 1 on all but the last."""
    group = p.flat_group()
    for coord in range(n if len(group) > 1 else 0):
        region = p.region(shape, n, coord)
        if region.numel and any(region.local_shape[dim] != 1 for dim in group[:-1]):
            return f"flat_group() is {group}, but coord {coord} has local shape {region.local_shape}"
    return None


def names_find_its_own_cut(p: Partition, shape: Shape, n: int) -> str | None:
    """A class that offers names for the cut of a 1-d tensor offers one that it is, for its own."""
    own = getattr(type(p).names, "__func__", None)
    if len(shape) != 1 or own is Partition.names.__func__:  # type: ignore[attr-defined]
        return None
    held = [held_along(p.region(shape, n, coord), 0) for coord in range(n)]
    offered = list(type(p).names(held.__getitem__, shape[0], n))
    for name in offered:
        regions = [name.region(shape, n, coord) for coord in range(n)]
        if all(same_runs(held_along(there, 0), here) for there, here in zip(regions, held, strict=True)):
            return None
    return f"names() of what {p} holds are {offered}: none holds that" if offered else None


def undivided_means_one_coord(p: Partition, shape: Shape, n: int) -> str | None:
    """What says `undivided` is whole on one coord, in order."""
    if not p.undivided:
        return None
    whole = list(range(prod(shape)))
    holders = [coord for coord, held in enumerate(_locals(p, shape, n)) if held == whole]
    return None if holders or not whole else "it says undivided, but no coord holds all elements in order"


def within_is_the_composed_region(p: Partition, shape: Shape, n: int) -> str | None:
    """`within` is the region of the local tensor, in indices of the tensor that an outer region is of."""
    if type(p).within is Partition.within:
        return None
    for outer in _outer_regions(shape):
        for coord in range(n):
            inner = p.region(outer[1].local_shape, n, coord)
            wanted = compose_regions(outer[1], inner)
            given = p.within(outer[1], n, coord)
            same = given.local_shape == wanted.local_shape and _elements(given, outer[0]) == _elements(
                wanted, outer[0]
            )
            if not same:
                return f"within({outer[1]!r}) of coord {coord} is {given!r}, its region there is {wanted!r}"
    return None


def _outer_regions(shape: Shape) -> Iterator[tuple[Shape, Region]]:
    """Regions whose local tensor has this shape, and the tensors that they are of."""
    if not shape:
        return
    twice = (2 * shape[0], *shape[1:])
    yield twice, Shard(0).region(twice, 2, 1)
    yield shape, Owner(0).region(shape, 2, 0)
    if len(shape) == 2 and shape[0] == 1:
        square = (2, shape[1])
        yield square, Ragged((1, 1), (0, 1)).region(square, 2, 1)


def untouched_dims_may_be_cut_first(p: Partition, shape: Shape, n: int) -> str | None:
    """A cut of a dim that is not in `touched_dims` gives the same before and after."""
    if type(p).touched_dims is Partition.touched_dims:
        return None
    touched = set(p.touched_dims(shape, n))
    for dim in set(range(len(shape))) - touched:
        first, second = (_both(p, dim, shape, n, order) for order in (("p", "s"), ("s", "p")))
        if first != second:
            return (
                f"touched_dims() is {sorted(touched)}, but cutting dim {dim} before or after is not the same"
            )
    return None


def _both(p: Partition, dim: int, shape: Shape, n: int, order: tuple[str, str]) -> list[list[int]]:
    """What each rank of two axes holds, applied one after the other from the regions alone."""
    found = []
    for mine, other in product(range(n), range(2)):
        x = _numbered(shape)
        for name in order:
            part, at, size = (p, mine, n) if name == "p" else (Shard(dim), other, 2)
            x = take_region(x, part.region(tuple(x.shape), size, at))
        found.append(x.reshape(-1).tolist())
    return found


def resolved_means_the_same(p: Placement, shape: Shape, n: int) -> str | None:
    """`resolved` changes nothing but how dims are counted, and changes it once."""
    known = p.resolved(len(shape))
    if known is p or not isinstance(p, Partition) or not isinstance(known, Partition):
        return None
    if known.resolved(len(shape)) != known:
        return f"resolved() is {known}, and resolved again {known.resolved(len(shape))}"
    try:
        wanted = _locals(p, shape, n)
    except Exception:  # noqa: BLE001 - a class may count its dims from the front before anything else
        return None
    return None if _locals(known, shape, n) == wanted else f"resolved() is {known}, another split"


def split_and_join_are_differentiable(p: Partition, shape: Shape, n: int) -> str | None:
    """The gradient of a split reaches what was split, and that of a join its parts."""
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    parts = [p.split(x, n, coord) for coord in range(n)]
    joined = p.join([part.clone() for part in parts], shape)
    if not joined.numel():
        return None
    found: Any = torch.autograd.grad((joined * joined).sum(), x, allow_unused=True)
    gradient = found[0]
    if gradient is None or not torch.equal(gradient, 2 * x.detach()):
        return f"the gradient of sum(join(split(x)) ** 2) is {gradient}, not 2 x"
    return None


def the_gradient_of_a_part_is_that_part(p: Partition, shape: Shape, n: int) -> str | None:
    """`dual` holds what the partition holds."""
    dual: Any = p.dual()
    if dual is p:
        return None
    if isinstance(dual, Partition) and _locals(dual, shape, n) == _locals(p, shape, n):
        return None
    return f"dual() is {dual}: the gradient of a part is that part of the gradient"


def any_size_means_any_size(p: Partition, shape: Shape, n: int) -> str | None:
    """What says `any_size` cuts the same dim of a tensor with other sizes, and takes that too."""
    if not p.any_size or 0 in shape:
        return None
    larger = tuple(size if size == 1 else size + 3 for size in shape)
    try:
        p.validate(larger, n)
    except PlacementError as error:
        return f"it says any_size, takes shape {shape} and refuses {larger}: {error}"
    if p.cut_dims(larger, n) != p.cut_dims(shape, n):
        cuts = p.cut_dims(shape, n), p.cut_dims(larger, n)
        return f"it says any_size, and cuts dims {cuts[0]} of {shape}, {cuts[1]} of {larger}"
    return None


def local_length_counts_the_runs(p: Partition, shape: Shape, n: int) -> str | None:
    """`local_length` is the number of indices that `runs` names."""
    for coord in range(n if isinstance(p, AlongDim) else 0):
        length = shape[p.dim]  # type: ignore[attr-defined]
        given, wanted = p.local_length(length, n, coord), total(p.runs(length, n, coord))  # type: ignore[attr-defined]
        if given != wanted:
            return f"local_length({length}) of coord {coord} is {given}, its runs have {wanted}"
    return None


PARTITION_HOOKS: tuple[Callable[[Partition, Shape, int], str | None], ...] = (
    on_dim_agrees_with_the_region,
    renumbered_dims_are_the_same_split,
    names_find_its_own_cut,
    a_flat_group_is_one_dim,
    undivided_means_one_coord,
    within_is_the_composed_region,
    untouched_dims_may_be_cut_first,
    split_and_join_are_differentiable,
    the_gradient_of_a_part_is_that_part,
    any_size_means_any_size,
    local_length_counts_the_runs,
)

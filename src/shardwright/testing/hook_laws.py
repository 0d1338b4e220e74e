"""What a placement says of itself beside its meaning, compared with what follows from the meaning alone.

A partition means its regions, a pending its `combine`: each other method is a statement that the library
relies on, so each is tried here. `HOOKS` lists them all, with the law that speaks of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import PlacementError
from shardwright.index.assemble import derived_cut_dims, take_region
from shardwright.index.compose import compose_regions
from shardwright.index.region import Region, Shape
from shardwright.index.runs import total
from shardwright.layout.mesh_shape import MeshShape
from shardwright.placement.along_dim import AlongDim
from shardwright.placement.base import Partition, Pending, Placement
from shardwright.placement.one_dim import held_along, same_runs
from shardwright.placement.one_dim_form import one_dim_form, placed_on
from shardwright.placement.owner import Owner
from shardwright.placement.ragged import Ragged
from shardwright.placement.shard import Shard

HOOKS: dict[str, str] = {
    "region": "regions_fit, each_element_once",
    "local_shape": "local_shape_is_the_regions",
    "even": "local_shape_is_the_regions",
    "split": "split_is_the_region, split_and_join_are_differentiable",
    "join": "split_is_the_region, split_and_join_are_differentiable",
    "cut_dims": "cut_dims_are_the_regions",
    "touched_dims": "cut_dims_are_the_regions, untouched_dims_may_be_cut_first",
    "on_dim": "another_dim_is_the_same_split, on_dim_agrees_with_the_region",
    "on_dims": "renumbered_dims_are_the_same_split",
    "names": "names_find_its_own_cut",
    "flat_group": "a_flat_group_is_one_dim",
    "undivided": "undivided_means_one_coord",
    "within": "within_is_the_composed_region",
    "resolved": "resolved_means_the_same",
    "validate": "validate_raises_placement_errors",
    "any_size": "any_size_means_any_size",
    "dual": "the_gradient_of_a_part_is_that_part, the_gradient_of_a_linear_reduction",
    "text": "is_a_value",
    "runs": "regions_fit, each_element_once",
    "local_length": "local_length_counts_the_runs",
    "moved": "another_dim_is_the_same_split",
    "combine": "combine_undoes_embed, combine_is_elementwise",
    "combine_in_place": "in_place_combines_alike",
    "embed": "combine_undoes_embed, embed_makes_a_new_tensor",
    "identity": "identity_is_ignored",
    "in_domain": "combine_undoes_embed",
    "linear": "linear_means_linear",
    "tolerance": "combine_undoes_embed",
    "is_partial": "names_its_reduction",
    "reduce_op": "names_its_reduction",
    "can_be_target": "combine_undoes_embed",
}


def _numbered(shape: Shape) -> Tensor:
    return torch.arange(prod(shape)).reshape(shape)


def _locals(p: Partition, shape: Shape, n: int) -> list[list[int]]:
    """What each coord holds, from the regions alone."""
    x = _numbered(shape)
    return [take_region(x, p.region(shape, n, coord)).reshape(-1).tolist() for coord in range(n)]


def _held(region: Region, shape: Shape) -> list[int]:
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
            same = given.local_shape == wanted.local_shape and _held(given, outer[0]) == _held(
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
    mesh = MeshShape(("p", "s"), (n, 2))
    for dim in set(range(len(shape))) - touched:
        first, second = (_both(p, dim, shape, mesh, order) for order in (("p", "s"), ("s", "p")))
        if first != second:
            return (
                f"touched_dims() is {sorted(touched)}, but cutting dim {dim} before or after is not the same"
            )
    return None


def _both(p: Partition, dim: int, shape: Shape, mesh: MeshShape, order: tuple[str, str]) -> list[list[int]]:
    """What each rank of two axes holds, applied one after the other from the regions alone."""
    found = []
    for coords in (mesh.coords_of(rank) for rank in mesh.ranks):
        x = _numbered(shape)
        for name in order:
            part, at, size = (p, coords[0], mesh.sizes[0]) if name == "p" else (Shard(dim), coords[1], 2)
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

# ------------------------------------------------------------------------------------------- pendings


def _terms(p: Pending, shape: Shape, n: int) -> list[Tensor]:
    x = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 1
    return [p.embed(x, n, coord) for coord in range(n)] if p.in_domain(x) else []


def in_place_combines_alike(p: Pending, shape: Shape, n: int) -> str | None:
    """`combine_in_place` gives what `combine` gives, and leaves alone what is not free."""
    for free in ([False] * n, [True] * n, [coord % 2 == 1 for coord in range(n)]):
        terms = _terms(p, shape, n)
        if not terms:
            return None
        before, wanted = [term.clone() for term in terms], p.combine([term.clone() for term in terms])
        given = p.combine_in_place(terms, free)
        if not torch.allclose(given, wanted, rtol=1e-12, atol=0, equal_nan=True):
            return f"combine_in_place() is {given.tolist()}, combine() {wanted.tolist()}"
        kept = zip(terms, before, free, strict=True)
        if any(not may and not torch.equal(term, old) for term, old, may in kept):
            return "combine_in_place() changed a local tensor that was not free"
    return None


def embed_makes_a_new_tensor(p: Pending, shape: Shape, n: int) -> str | None:
    """What `embed` returns shares no memory with the value."""
    x = torch.ones(shape, dtype=torch.float64)
    for coord in range(n if x.numel() and p.in_domain(x) else 0):
        if p.embed(x, n, coord).untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
            return f"embed() of coord {coord} is the value itself: a write into one would reach the other"
    return None


def the_gradient_of_a_linear_reduction(p: Pending, _shape: Shape, _n: int) -> str | None:
    """The gradient of a sum is each term's gradient: a `dual` of anything but the whole value is wrong."""
    if not isinstance(p.dual(), Placement) or p.dual().is_partition or p.dual().is_pending:
        return f"dual() is {p.dual()}: each term of a reduction needs the whole gradient"
    return None


def names_its_reduction(p: Pending, _shape: Shape, _n: int) -> str | None:
    """`is_partial` answers for the reduction that `reduce_op` names, and for no other."""
    if not p.is_partial():
        return "is_partial() is False: every Pending is"
    named: Any = p.reduce_op
    if not isinstance(named, str):
        return f"reduce_op is {named!r}, not a name"
    if p.is_partial("no such reduction") or (p.reduce_op and not p.is_partial(p.reduce_op)):
        return f"is_partial() does not answer for the reduction {p.reduce_op!r} alone"
    return None


PENDING_HOOKS: tuple[Callable[[Pending, Shape, int], str | None], ...] = (
    in_place_combines_alike,
    embed_makes_a_new_tensor,
    the_gradient_of_a_linear_reduction,
    names_its_reduction,
)

"""What a placement says of itself beside its meaning, compared with what follows from the meaning alone.

A partition means its regions, a pending its `combine`: each other method is a statement that the library
relies on, so each is tried: those of pendings here, those of partitions in `placement.partition_laws`.
`HOOKS` lists them all, with the law that speaks of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.index.region import Shape
from shardwright.placement.base import Pending, Placement

HOOKS: dict[str, str] = {
    "region": "regions_make_up_the_tensor",
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
    "runs": "regions_make_up_the_tensor",
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
        if any(not may and not torch.equal(term, old) and not _alike(term, old) for term, old, may in kept):
            return "combine_in_place() changed a local tensor that was not free"
    return None


def _alike(term: Tensor, old: Tensor) -> bool:
    """Floats whose bits are the same: a NaN is not equal to itself."""
    return term.dtype.is_floating_point and torch.allclose(term, old, rtol=0, atol=0, equal_nan=True)


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

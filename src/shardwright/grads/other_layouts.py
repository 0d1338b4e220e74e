"""Gradients that lie otherwise than their parameters, on some ranks perhaps, each brought home by itself.

Ranks that read other rows may come to other layouts of one gradient (through a view of the parameter, say) on
the axes that they compute on together: one without rows finds other ways the cheapest. Along such an axis all
ranks have the same layout, so each of its groups moves by itself, and what is pending on the other axes stays
so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.comm.functional import reduce_over
from shardwright.comm.record import because
from shardwright.compat import axis_names
from shardwright.context.submesh import groups_above_one
from shardwright.grads.state import SUM
from shardwright.layout.layout import Layout
from shardwright.placement.base import Placement
from shardwright.tensor.dtensor import DTensor


def can_come_home(
    mesh: DeviceMesh, own: Mapping[int, DTensor | None], wanted: Mapping[int, Layout]
) -> list[int]:
    """Which of these gradients each group of ranks can bring to its parameter's layout, up to pending sums.

    The same on every rank: those that lie alike along each axis on which some rank has to move them.
    Cost: the pickled layouts, gathered over each axis, and an all-reduce of a byte for each gradient.
    """
    said = {i: None if x is None else x._spec.layout for i, x in own.items()}
    differ = dict.fromkeys(said, 0)
    at = {axis: i for i, axis in enumerate(axis_names(mesh))}
    for axis, group in groups_above_one(mesh):
        everybody: list[Any] = [None] * dist.get_world_size(group)
        with because("layouts of gradients that differ between ranks"):
            dist.all_gather_object(everybody, said, group=group)
        for i in said:
            theirs = {layouts[i] for layouts in everybody}
            moves = any(x is not None and _moves(x, wanted[i], at[axis]) for x in theirs)
            differ[i] |= int(moves and len(theirs) > 1)
    flags = torch.tensor(list(differ.values()), dtype=torch.uint8, device=mesh.device_type)
    for axis, group in groups_above_one(mesh):
        flags = reduce_over(flags, "max", group, axis=axis, reason="gradients that differ between ranks")
    return [i for i, flag in zip(differ, flags.tolist(), strict=True) if not flag]


def home_on_shared_axes(held: DTensor, placed: DTensor) -> DTensor:
    """The gradient of a parameter that computes as a local tensor, home on the axes that are left.

    Along those all ranks run one program, so they agree without asking. The gradient of any other parameter,
    and one that does not lie as a term on the axes of the data, is returned as it is.
    """
    use, have, want = placed._spec.use, held._spec.layout, placed._spec.layout
    if use is None:
        return held
    data = [at for at, axis in enumerate(want.axes) if axis in use.summed]
    if any(_moves(have, want, at) for at in data):
        return held
    return come_home(held, want)


def come_home(held: DTensor, wanted: Layout) -> DTensor:
    """The gradient in its parameter's layout, but for sums that are pending."""
    have = held._spec.layout
    target = [_home(h, w) for h, w in zip(have.placements, wanted.placements, strict=True)]
    with torch.no_grad():
        return held.redistribute(held.device_mesh, target, order=wanted.order_names)


def _home(have: Placement, want: Placement) -> Placement:
    return have if have == SUM and want.is_replicate() else want


def _moves(have: Layout, want: Layout, at: int) -> bool:
    one, other = have.placements[at], want.placements[at]
    return _home(one, other) != one

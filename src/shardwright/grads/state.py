"""What has become of a gradient on each rank, and what all ranks make of it together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.comm.functional import reduce_over
from shardwright.comm.record import because
from shardwright.comm.told import told
from shardwright.compat import axis_names
from shardwright.compat.fully_shard.parameters import managing_unit
from shardwright.context.submesh import groups_above_one
from shardwright.errors import ParallelError
from shardwright.layout.layout import Layout
from shardwright.placement.partial import Partial
from shardwright.remember import remembered
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.spec import Token
from shardwright.tensor.wrap import as_ours

SUM = Partial("sum")
_LOST = 2  # added to flags, each of which is 0 or 1


@dataclass(frozen=True, slots=True)
class GradientState:
    """How a gradient relates to its parameter's layout, on this rank or (combined) on some rank.

    missing: there is none.   finished: it has the parameter's layout.   other: it has yet another layout.
    pending: per mesh axis, whether it is a term of a sum where the parameter is replicated.
    partial: a number for the backwards that reached it, if one of its unit did not: to others it is missing.
    """

    missing: bool = False
    finished: bool = False
    other: bool = False
    pending: tuple[bool, ...] = ()
    partial: int = 0

    @staticmethod
    def of(name: str, gradient: Tensor | None, parameter: DTensor) -> GradientState:
        """Return the state on this rank.

        Raises:
            ParallelError: the gradient is no DTensor on its parameter's mesh.
        """
        unit = managing_unit(parameter)
        partial = unit.partial if unit is not None else 0
        if gradient is None:
            return GradientState(True, pending=(False,) * parameter.device_mesh.ndim, partial=partial)
        state = between(_on_its_mesh(name, gradient, parameter)._spec.token, parameter._spec.token)
        return replace(state, partial=partial) if partial else state

    @property
    def exists(self) -> bool:
        """Return whether there is a gradient (combined: on some rank)."""
        return self.finished or self.other or any(self.pending)

    @property
    def is_contradictory(self) -> bool:
        """Return whether a combined state has no common way to the parameter's layout."""
        return self.other and (self.finished or any(self.pending))


@remembered(4096)
def between(gradient: Token, parameter: Token) -> GradientState:
    """The state of a gradient that has one layout where its parameter has another."""
    have, want = gradient.spec.layout, parameter.spec.layout
    pairs = list(zip(have.placements, want.placements, strict=True))
    pending = tuple(h == SUM and w.is_replicate() for h, w in pairs)
    moves = any(h != w for (h, w), term in zip(pairs, pending, strict=True) if not term)
    if moves or not have.is_ordered_as(want):
        return GradientState(other=True, pending=(False,) * len(pairs))
    return GradientState(finished=not any(pending), pending=pending)


def agree(
    mesh: DeviceMesh, states: Sequence[GradientState], device: torch.device, *, lost: bool = False
) -> list[GradientState]:
    """Return, for each gradient, what is true of it on some rank of `mesh`.

    Args: lost: this rank cannot go on; the states are any, as many as its peers have.
    Raises: ParallelError: so it is on some rank.
    Cost: one all-reduce per axis, of 3 bytes plus one per axis for each gradient.
    """
    rows = [(each.missing or each.partial > 0, each.finished, each.other, *each.pending) for each in states]
    flags = torch.tensor(rows, dtype=torch.uint8, device=device) + _LOST * lost
    for axis, group in groups_above_one(mesh):
        flags = reduce_over(flags, "max", group, axis=axis, reason="which ranks have which gradients")
    known = told(flags)
    if known and known[0][0] >= _LOST:
        raise ParallelError(
            f"a rank of {axis_names(mesh)} cannot go on with its gradients, as its own error says; none was "
            "changed"
        )
    return [_from_row(row) for row in known]


def differ_along(axis: str, mesh: DeviceMesh, numbers: Sequence[int], device: torch.device) -> list[bool]:
    """Whether ranks along this axis have other numbers. Cost: an all-reduce of 16 bytes for each of them."""
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    both, group = torch.stack((own, -own)), mesh.get_group(axis)
    high, low = told(reduce_over(both, "max", group, axis=axis, reason="which backwards reached gradients"))
    return [one != -other for one, other in zip(high, low, strict=True)]


def told_by_any(mesh: DeviceMesh, own: Mapping[int, Layout | None]) -> dict[int, Layout]:
    """The layout of each gradient that some rank of `mesh` has; the same keys on every rank.

    Raises: ParallelError: two ranks have it in different layouts; raised on every rank.
    Cost: the pickled layouts, gathered over each axis.
    """
    known: dict[int, set[Layout]] = {i: {x} if x is not None else set() for i, x in own.items()}
    for _, group in groups_above_one(mesh):
        everybody: list[Any] = [None] * dist.get_world_size(group)
        with because("layouts of gradients that some ranks lack"):
            dist.all_gather_object(everybody, known, group=group)
        known = {i: set().union(*(theirs[i] for theirs in everybody)) for i in known}
    if any(len(layouts) > 1 for layouts in known.values()):
        raise ParallelError(
            "gradients that some ranks lack have unlike layouts on others; run the same backward passes on "
            "all ranks"
        )
    return {i: next(iter(layouts)) for i, layouts in known.items()}


def _from_row(row: Sequence[int]) -> GradientState:
    """Return the state that one row of flags means."""
    missing, finished, other, *pending = (bool(flag) for flag in row)
    return GradientState(missing, finished, other, tuple(pending))


def _on_its_mesh(name: str, gradient: Tensor, parameter: DTensor) -> DTensor:
    """Return a gradient as ours; it must live where its parameter does."""
    if not isinstance(gradient, TorchDTensor):
        raise ParallelError(
            f"the gradient of {name} is a plain tensor although the parameter is distributed "
            f"({parameter._spec.layout}); assign a DTensor on the parameter's mesh"
        )
    have, want = gradient._spec.mesh, parameter._spec.mesh
    if have is not want and have != want:
        raise ParallelError(
            f"the gradient of {name} is on {gradient.device_mesh}, its parameter on "
            f"{parameter.device_mesh}; redistribute it to the parameter's mesh"
        )
    return as_ours(gradient)

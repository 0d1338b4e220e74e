"""An op rehearsed: the ways that dispatch takes, on local tensors without data, as one rank of a mesh.

What runs and what it sends is then known without a process group: the record of a rehearsal is what a trace
of the op would list. Where data decide (a mask's number of elements), there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from shardwright.comm.record import Decision, Event, Recorder, only_to
from shardwright.compat import TorchDispatchMode, tree_flatten, tree_map_only
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import MeshShape
from shardwright.remember import remembered
from shardwright.tensor import DTensor
from shardwright.tensor.explicit_mode import implicit
from shardwright.tensor.spec import spec_of
from shardwright.tensor.wrap import wrap


@dataclass(frozen=True)
class Rehearsal:
    """What one rank would do. parts: the ops on distributed tensors that the op runs as, in order.

    collectives: what that rank would send. decisions: what the op chose on its own. outputs: of its results.
    """

    rank: int
    parts: tuple[str, ...]
    collectives: tuple[Event, ...]
    decisions: tuple[Decision, ...]
    outputs: tuple[Layout | None, ...]

    @property
    def bytes(self) -> int:
        """What that rank would send."""
        return sum(event.bytes_sent for event in self.collectives)

    @property
    def fallback(self) -> bool:
        """Is anything made whole for want of a rule?"""
        return any(decision.reason.startswith("fallback") for decision in self.decisions)


def rehearse(
    op: torch._ops.OpOverload, operands: Sequence[Any], named: Mapping[str, Any], rank: int | None = None
) -> Rehearsal | None:
    """Run `op` as that rank (by default the mesh's first), on nothing; None where only data could tell.

    Cost: the time to decide; nothing is sent, and no generator of random numbers moves.
    """
    shapes = {v.mesh_shape for v in tree_flatten((operands, named))[0] if isinstance(v, Layout)}
    if len(shapes) != 1:
        return None
    shape = shapes.pop()
    mesh = _stage(shape, shape.ranks[0] if rank is None else rank)
    recorder, parts = Recorder(), _Parts()
    try:
        with (
            _groups_of(mesh),
            only_to(recorder),
            implicit(),
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
        ):
            args, kwargs = tree_map_only(Layout, lambda x: _prop(x, mesh), (tuple(operands), dict(named)))
            args, kwargs = tree_map_only(torch.device, lambda _: torch.device("meta"), (args, kwargs))
            with parts:
                results = op(*args, **kwargs)
    except (RuntimeError, NotImplementedError):  # what asks for values, or for a kernel that there is not
        return None
    outputs = tuple(x._spec.layout if isinstance(x, DTensor) else None for x in tree_flatten(results)[0])
    facts = tuple(recorder.collectives), tuple(recorder.decisions), outputs
    return Rehearsal(mesh.as_rank, tuple(parts.names), *facts)


def _prop(layout: Layout, mesh: DeviceMesh) -> DTensor:
    """A DTensor of this layout whose local tensor has sizes and no data."""
    coords = tuple(mesh.get_coordinate() or ())
    local = torch.empty(layout.local_shape(coords), dtype=layout.dtype, device="meta")
    return wrap(local, spec_of(layout, mesh))


class _Group:
    """Stands for the process group of an axis."""

    def __init__(self, name: str, ranks: Sequence[int], own: int) -> None:
        self.group_name, self.ranks, self._own = name, tuple(ranks), own

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self._own


class _Stage(DeviceMesh):
    """A mesh without processes, seen as one rank of it. No two are equal: each has its own decisions."""

    as_rank: int

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """The stand-in of the axis' group."""
        names = self.mesh_dim_names or ()
        axis = 0 if mesh_dim is None else names.index(mesh_dim) if isinstance(mesh_dim, str) else mesh_dim
        return self.groups[axis]

    groups: list[_Group]
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


@remembered(256)
def _stage(shape: MeshShape, rank: int) -> _Stage:
    grid = torch.tensor(shape.ranks, device="cpu").view(shape.sizes)
    stage = _Stage("meta", grid, mesh_dim_names=shape.axes, _init_backend=False, _rank=rank)
    stage.as_rank = rank
    coords = shape.coords_of(rank)
    stage.groups = []
    for axis, name in enumerate(shape.axes):
        stage.groups.append(_Group(name, shape.line(coords, axis), coords[axis]))
    return stage


@contextmanager
def _groups_of(mesh: _Stage) -> Iterator[None]:
    """torch is asked for the ranks of a group by the group."""
    known: dict[Any, dict[int, int]] = distributed_c10d._world.pg_group_ranks
    for group in mesh.groups:
        known[group] = {rank: i for i, rank in enumerate(group.ranks)}
    try:
        yield
    finally:
        for group in mesh.groups:
            del known[group]


class _Parts(TorchDispatchMode):
    """Notes the ops that reach distributed tensors, and lets them run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            self.names.append(func.name())
            return NotImplemented
        return func(*args, **(kwargs or {}))

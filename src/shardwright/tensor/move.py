"""The one door through which elements move: refused where nobody asked for it, recorded, sent.

Nothing else in this layer plans and executes, but for many tensors together (`move_many.py`) and what is
sent while the program goes on (`under_way.py`). `lint-imports` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from shardwright.comm.execute import Bound, execute_sized
from shardwright.comm.record import record_decision, recording
from shardwright.index.region import Shape
from shardwright.layout.layout import Layout
from shardwright.plan import network
from shardwright.plan.any_size import plans_for
from shardwright.plan.decide import plan_redistribution
from shardwright.remember import memo
from shardwright.tensor.between import own_coords
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.expanded import base_of, bases, expanded_dims
from shardwright.tensor.explicit_mode import refuse_moves
from shardwright.tensor.graph_spec import GraphSpec
from shardwright.tensor.spec import Spec, Token
from shardwright.tensor.wrap import up_to_date


def move_asked(x: DTensor, target: Layout, *, reason: str) -> torch.Tensor:
    """What this rank holds once `x` has the layout `target`: the program wrote it, or it was announced.

    What an algorithm moves while it runs was refused and recorded with the algorithm.

    The local tensor of `x` itself if it has that layout. Not differentiable: autograd lies above. Cost: what
    `plan_redistribution(sw.layout_of(x), target)` states.
    """
    spec = x._spec
    if isinstance(spec, GraphSpec):
        return move_to_spec(x, spec.placed(lambda _: target), reason=reason)
    if spec.layout is target:
        return x._local_tensor
    key = spec.token, target, network.version
    road = _roads.get(key)
    return _along(_learnt(key, spec, target) if road is None else road, x, reason)


def move_to_spec(x: DTensor, target: Spec, *, reason: str) -> torch.Tensor:
    """As `move_asked`, to the layout of a spec, which is found by identity."""
    spec = x._spec
    if isinstance(target, GraphSpec):
        if isinstance(spec, GraphSpec) and spec.coords is not None and not spec.repeats:
            plans = plans_for(spec.shown.layout, target.shown.layout, spec.sizes, spec.coords)
            if plans is not None:
                return execute_sized(plans, x._local_tensor, spec.mesh, spec.coords, reason=reason)
        target = target.fix()
    key = spec.token, target.token, network.version
    road = _roads.get(key)
    return _along(_learnt(key, spec, target.layout) if road is None else road, x, reason)


def _along(road: _Road, x: DTensor, reason: str) -> torch.Tensor:
    if road.bound is None:
        return x._local_tensor
    local = x._local_tensor.resolve_conj().resolve_neg()  # what is sent are bytes, not flags
    if road.repeated is None:
        return road.bound.run(local, reason)
    moved = road.bound.run(base_of(local, road.repeated), f"{reason}: what it was expanded from")
    return moved if road.shape is None else moved.expand(road.shape)


class _Road(NamedTuple):
    """How tensors of one spec get a layout.

    bound:    the plan; None: they have it.
    repeated: the dims along which they repeat one element, which moves once; None: there are none.
    shape:    the local shape in which the result repeats it again; None: on a rank that has no part.
    """

    bound: Bound | None
    repeated: tuple[int, ...] | None = None
    shape: Shape | None = None


_MANY_ROADS = 16384
_Key = tuple[Token, Layout | Token, int]  # from, to, the network that a plan is cheap on
_roads: dict[_Key, _Road] = memo("moves between layouts", {})


def _learnt(key: _Key, spec: Spec, target: Layout) -> _Road:
    if len(_roads) >= _MANY_ROADS:
        _roads.clear()
    made = _roads[key] = _road(spec, target)
    return made


def _road(spec: Spec, target: Layout) -> _Road:
    source = spec.layout
    if source == target:
        return _Road(None)
    small = bases(source, target) if 0 in source.stride else None
    if small is None:
        return _Road(Bound(plan_redistribution(source, target), spec.mesh))
    same = target.mesh_shape == source.mesh_shape
    coords = spec.coords if same else own_coords(target)
    shape = None if coords is None else target.local_shape(coords)
    repeated = () if spec.coords is None else expanded_dims(source)  # who is outside has a part of one dim
    return _Road(Bound(plan_redistribution(*small), spec.mesh), repeated, shape)


def move_operands(
    op: str,
    wanted: Sequence[tuple[DTensor, Layout]],
    why: str,
    *,
    refuse: Callable[[], None] | None = None,
    kind: str = "redistribute",
) -> list[torch.Tensor]:
    """The local tensors of an op's operands in the layouts that it needs: refuse, record, move.

    Args:
        op: its name.
        wanted: operands and their layouts.
        why: for people.
        refuse: raises in the op's own words inside `explicit()`, for all operands at once; without it each
            operand is refused alone.
        kind: what the record calls it.
    Raises: ImplicitRedistributionError: inside `explicit()`, before anything is sent.
    """
    if refuse is not None:
        refuse()
    else:
        for x, target in wanted:
            refuse_moves(op, x, target, why)
    moved = []
    for x, target in wanted:
        if recording() and x._spec.shown.layout != target:
            record_decision(op, f"{kind}: {why}", f"{x._spec.shown.layout} -> {target}")
        moved.append(move_asked(x, target, reason=f"{op}: {why}"))
    return moved


def move_unasked(op: str, x: DTensor, target: Layout, why: str) -> torch.Tensor:
    """`move_operands` of one operand."""
    return move_operands(op, [(x, target)], why)[0]


def move_in_algorithm(algorithm: str, x: DTensor, target: Layout, why: str) -> torch.Tensor:
    """What an algorithm moves while it runs: the record is that of the algorithm.

    Raises: ImplicitRedistributionError: inside `explicit()`, before anything is sent.
    """
    refuse_moves(algorithm, x, target, why)
    return move_asked(x, target, reason=algorithm)


def whole_unasked(op: str, x: DTensor, why: str) -> torch.Tensor:
    """All finished elements, which an op needs that the program did not write so: refuse, record, gather."""
    up_to_date(x)
    return move_unasked(op, x, x._spec.layout.replicated(), why)


def announce(op: str, x: DTensor, target: Layout, why: str) -> None:
    """Refuse and record a move that comes later, before anything is changed.

    Raises: ImplicitRedistributionError: inside `explicit()`, where the move would send something.
    """
    if x._spec.layout == target:
        return
    refuse_moves(op, x, target, why)
    if recording():
        record_decision(op, f"redistribute: {why}", f"{x._spec.layout} -> {target}")

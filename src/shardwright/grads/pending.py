"""Bringing gradients to the layouts of their parameters, with all ranks agreed on what is done."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.comm.bucket import sums_in_turn
from shardwright.compat import DisableTorchFunctionSubclass, axis_names
from shardwright.compat.fully_shard.parameters import FsdpParameter, managing_unit
from shardwright.context.submesh import groups_above_one
from shardwright.errors import ParallelError
from shardwright.grads.entry import Entry, spec_like
from shardwright.grads.other_layouts import can_come_home, come_home, home_on_shared_axes
from shardwright.grads.parameters import name_list
from shardwright.grads.state import GradientState, agree, differ_along, told_by_any
from shardwright.layout.layout import Layout
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.spec import Spec, spec_of
from shardwright.tensor.wrap import as_ours, wrap


@dataclass
class _OnMesh:
    """Parameters of one mesh and their gradients, in columns: a row would be an object for each of thousands.

    held: the gradients, for reading `.grad` is a call.   own: their states on this rank.
    """

    mesh: DeviceMesh
    names: list[str] = field(default_factory=list)
    parameters: list[TorchDTensor] = field(default_factory=list)
    placed: list[DTensor] = field(default_factory=list)
    held: list[DTensor | None] = field(default_factory=list)
    own: list[GradientState] = field(default_factory=list)

    def entry(self, i: int) -> Entry:
        """One of them."""
        return Entry(self.names[i], self.parameters[i], self.placed[i])

    def named(self, which: Iterable[int]) -> str:
        """Some names, for an error."""
        return name_list([self.names[i] for i in which])


@dataclass
class _Sum:
    """Gradients that are pending on the same axes.

    terms: what this rank adds to each.   specs: what each sum is then, laid out like its parameter.
    """

    parameters: list[TorchDTensor] = field(default_factory=list)
    terms: list[Tensor] = field(default_factory=list)
    specs: list[Spec] = field(default_factory=list)


def finish_gradients(parameters: Mapping[str, TorchDTensor], bucket_bytes: int, *, agreed: bool) -> None:
    """Give every gradient the layout of its parameter, adding up what is pending.

    A gradient that only some ranks have is zeros on the others; one that only some ranks have a new term of
    (a second backward after a sum) becomes a term on all.

    Args:
        parameters: {name: distributed parameter}, the same on every rank of their meshes.
        bucket_bytes: the size of one flat all-reduce.
        agreed: every rank is known to have the same gradients in the same states, so nobody asks.

    Raises:
        ParallelError: the layouts of one gradient on two ranks contradict each other; raised on every rank.
    """
    try:
        by_mesh = _by_mesh(parameters)
    except Exception:  # whatever it is, the other ranks wait
        if not agreed:
            tell_lost(parameters)
        raise
    for found in by_mesh:
        states = found.own
        if not agreed:
            states = agree(found.mesh, found.own, found.parameters[0].device)
            if _bring_home(found, states):
                states = agree(found.mesh, found.own, found.parameters[0].device)
            _check(found, states)
            _join(found, states)
        _finish(found, states, bucket_bytes)


def tell_lost(parameters: Mapping[str, TorchDTensor]) -> None:
    """Let peers that wait in `finish_gradients` for this rank's states hear that it cannot go on."""
    first = next(iter(parameters.values()), None)
    if first is not None:
        mesh = first._spec.mesh
        none = GradientState(pending=(False,) * mesh.ndim)
        with suppress(ParallelError):
            agree(mesh, [none for p in parameters.values() if p._spec.mesh == mesh], first.device, lost=True)


def _by_mesh(parameters: Mapping[str, TorchDTensor]) -> Iterable[_OnMesh]:
    """Read every gradient, once."""
    with DisableTorchFunctionSubclass():
        gradients = [parameter.grad for parameter in parameters.values()]
    found: dict[DeviceMesh, _OnMesh] = {}
    here: _OnMesh | None = None
    for (name, parameter), has in zip(parameters.items(), gradients, strict=True):
        gradient = has
        placed = as_ours(parameter)
        mesh = placed._spec.mesh
        if here is None or mesh is not here.mesh:  # hashing a mesh is a call
            here = found.setdefault(mesh, _OnMesh(mesh))
        state = GradientState.of(name, gradient, placed)
        if state.other and isinstance(gradient, TorchDTensor):
            gradient = parameter.grad = home_on_shared_axes(as_ours(gradient), placed)
            state = GradientState.of(name, gradient, placed)
        here.own.append(state)
        here.names.append(name)
        here.parameters.append(parameter)
        here.placed.append(placed)
        here.held.append(as_ours(gradient) if isinstance(gradient, TorchDTensor) else None)
    return found.values()


def _join(found: _OnMesh, states: Sequence[GradientState]) -> None:
    """Where only some ranks have a gradient that lies otherwise than its parameter, the others get zeros.

    Cost: none where there is no such gradient; else the layouts of all of them, over each axis.
    """
    asked = [i for i, state in enumerate(states) if state.other and state.missing]
    if not asked:
        return
    own: dict[int, Layout | None] = {}
    for i in asked:
        held = found.held[i]
        own[i] = None if held is None else held._spec.layout
    for i, layout in told_by_any(found.mesh, own).items():
        if found.held[i] is None:
            zeros = _zeros(found.placed[i], layout)
            found.parameters[i].grad = zeros
            found.held[i] = zeros
            found.own[i] = found.entry(i).state()


def _bring_home(found: _OnMesh, states: Sequence[GradientState]) -> bool:
    """Where a gradient lies otherwise on some ranks only, bring it home there, if that is the ranks' own.

    Returns: whether a rank has moved any, the same on all of them.
    """
    asked = [i for i, state in enumerate(states) if state.is_contradictory]
    if not asked:
        return False
    wanted = {i: found.placed[i]._spec.layout for i in asked}
    able = can_come_home(found.mesh, {i: found.held[i] for i in asked}, wanted)
    for i in able:
        held = found.held[i]
        if held is not None and found.own[i].other:
            home = come_home(held, wanted[i])
            found.parameters[i].grad = home
            found.held[i] = home
            found.own[i] = found.entry(i).state()
    return bool(able)


def _zeros(placed: DTensor, layout: Layout) -> DTensor:
    """A gradient of zeros in this layout."""
    spec = spec_of(layout, placed.device_mesh)
    shape = layout.local_shape(spec.coords or (0,) * len(layout.sizes))
    return wrap(placed._local_tensor.new_zeros(shape, dtype=layout.dtype), spec)


def _check(found: _OnMesh, states: Sequence[GradientState]) -> None:
    """Raise ParallelError for states that have no common way on."""
    wrong = [i for i, state in enumerate(states) if state.is_contradictory]
    if wrong:
        raise ParallelError(
            f"gradients of {found.named(wrong)} have other layouts on some ranks than on their peers; run "
            "the same backward passes on all ranks"
        )
    _refuse_mixed_sums(found, states)


def _refuse_mixed_sums(found: _OnMesh, states: Sequence[GradientState]) -> None:
    """Raise ParallelError where ranks of a sharded unit have gradients of different parameters.

    torch joins those that a rank has, one after another, and adds what the ranks made: gradients of different
    parameters. Only copies of a unit, on the other axes, may have different ones.
    """
    device = found.parameters[0].device
    by_axis: defaultdict[str, dict[int, FsdpParameter]] = defaultdict(dict)
    for i, (state, parameter) in enumerate(zip(states, found.parameters, strict=True)):
        unit = managing_unit(parameter)
        if state.missing and state.exists and unit is not None:
            by_axis[getattr(parameter, "_fully_sharded", "")][i] = unit
    for axis, asked in by_axis.items():
        mixed = differ_along(axis, found.mesh, [unit.reached for unit in asked.values()], device)
        told = agree(found.mesh, [GradientState(missing=each) for each in mixed], device)
        wrong = [i for i, each in zip(asked, told, strict=True) if each.missing]
        if wrong:
            raise ParallelError(_MIXED_SUMS.format(axis, found.named(wrong)))
        for unit in asked.values():
            unit.settle()


_MIXED_SUMS = (
    "the backwards of some ranks of axis {!r} reached {}, those of others did not: fully_shard joins the "
    "gradients that a rank has, and added those of different parameters\n  fix: "
    "model.set_reduce_scatter_unused_params(True) before the backward (torch 2.13), or parallelize_replicate"
)


def _finish(found: _OnMesh, states: Sequence[GradientState], bucket_bytes: int) -> None:
    """Bring gradients to their parameters' layouts: sums in buckets, whatever else one by one."""
    sums: dict[tuple[bool, ...], _Sum] = {}
    for i, (state, own, held) in enumerate(zip(states, found.own, found.held, strict=True)):
        if state.other and held is not None:
            target = found.placed[i]._spec.layout
            moved = held.redistribute(found.mesh, list(target.placements), order=target.order_names)
            found.parameters[i].grad = moved.detach()
        elif True in state.pending:
            work = sums.get(state.pending) or sums.setdefault(state.pending, _Sum())
            spec = found.placed[i]._spec
            like = spec.token if held is None else held._spec.token
            is_term = held is not None and own.pending == state.pending
            work.parameters.append(found.parameters[i])
            work.terms.append(
                held._local_tensor if is_term else found.entry(i).term(own, state.pending)  # type: ignore[union-attr]
            )
            work.specs.append(spec_like(like, spec.token))
        elif state.exists and held is None:
            found.entry(i).put(torch.zeros_like(found.placed[i]._local_tensor))
    held = None
    found.held.clear()  # each is let go as its sum takes its place
    for pending, each in sums.items():
        _sum_in_buckets(found.mesh, pending, each, bucket_bytes)


def _sum_in_buckets(mesh: DeviceMesh, pending: tuple[bool, ...], work: _Sum, bucket_bytes: int) -> None:
    """All-reduce the local terms over the pending axes in flat buckets, one per dtype and `bucket_bytes`."""
    summed = {axis for axis, is_summed in zip(axis_names(mesh), pending, strict=True) if is_summed}
    groups = [(axis, group) for axis, group in groups_above_one(mesh) if axis in summed]
    like = [None if term.is_contiguous() else term for term in work.terms]
    for places, totals in sums_in_turn(work.terms, groups, bucket_bytes, reason="sum gradients"):
        with DisableTorchFunctionSubclass():
            for i, total in zip(places, totals, strict=True):
                laid, like[i] = like[i], None
                own = total if laid is None else torch.empty_like(laid).copy_(total)
                work.parameters[i].grad = wrap(own, work.specs[i])

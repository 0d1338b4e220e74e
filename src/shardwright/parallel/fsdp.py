"""Fully sharded data parallelism by torch's `fully_shard`, gradients summed and truthfully labelled."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Shard as TorchShard

from shardwright.compat import axis_names, on_axes
from shardwright.compat.fully_shard.parameters import FsdpParameter, Inside, follow_dtype, fsdp_parameters
from shardwright.compat.fully_shard.shown import show_sharded_between
from shardwright.compat.fully_shard.views import begin_before_bases
from shardwright.errors import ParallelError
from shardwright.grads.at_steps import watch_steps
from shardwright.grads.stages import heard_by_stages
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import ranks_of
from shardwright.layout.of_tensor import layout_of
from shardwright.parallel.direct_calls import serve_direct_calls
from shardwright.parallel.expert import spread_over
from shardwright.parallel.fully_shard_arguments import by_name
from shardwright.parallel.meshes import is_other_view, named_axes, refuse_other_order, refuse_twice
from shardwright.parallel.place import place_parameters, refuse_sparse_gradients
from shardwright.parallel.several import Modules, follow_several, members, one_unit
from shardwright.parallel.sharded_layouts import beside_in, goes_within, sharded_layouts
from shardwright.parallel.sharded_running import (
    follow_unit,
    refuse_graph,
    refuse_hidden,
    refuse_lost,
    told,
    unit_of,
)
from shardwright.parallel.sharded_traffic import record_sharded_traffic
from shardwright.parallel.swap import put_all
from shardwright.placement.base import Replicate
from shardwright.remember import remembered
from shardwright.tensor.autograd import as_term
from shardwright.tensor.local_use import kept_spec
from shardwright.tensor.modules.distribute import carry_over
from shardwright.tensor.modules.more_axes import cut_over
from shardwright.tensor.modules.same_model import Said, agreed
from shardwright.tensor.modules.slots import Slot, local_plain, slots_of
from shardwright.tensor.modules.ties import refuse_placed_elsewhere, ties_kept
from shardwright.tensor.spec import Spec, spec_of, with_dtype
from shardwright.tensor.wrap import as_ours, wrap


@heard_by_stages
def parallelize_fsdp(
    module: Modules, mesh: DeviceMesh, *fully_shard_args: Any, **fully_shard_kwargs: Any
) -> Modules:
    """Shard the parameters over the last axis of `mesh`, replicate them on the first of two, in place.

    Call it on the blocks first, then on the root, as with torch's `fully_shard`: what a block has taken, the
    root leaves alone. Inside a forward the parameters are whole (on these axes) plain tensors; outside they
    are DTensors, cut on dim 0. Gradients are summed, never averaged: Shard(0) on the shard axis, Pending(sum)
    on every replicated axis until `grads.GradientSynchronizer` adds them. A parameter without dims, which
    cannot be cut, is replicated on the shard axis. A shard axis over the ranks of axes on which parameters
    are whole DTensors (data and context ranks, flattened to one) takes the place of these.

    Args:
        module: a module, or several that are one unit (`[norm, head]`): gathered together when the first of
            them begins, until the last has ended or the whole model has. One that is called on its own,
            outside of the model's forward, gathers the unit for itself.
        mesh: one axis (shard) or two (replicate, shard).
        fully_shard_args, fully_shard_kwargs: passed on: `reshard_after_forward`, `mp_policy`,
            `offload_policy`, `ignored_params`, `shard_placement_fn`; by position in the order in which
            `fully_shard` names them after the mesh.
    Raises: ParallelError: another number of axes, an axis that places a parameter already, what
        `fully_shard` cannot run (two dtypes in a unit, a part without elements, a container, hooks of
        `Tensor.register_hook`), ranks with other parameters; nothing has been changed then.
    Warns: of parameters whose values differ between the ranks, of which each would keep a part of its own:
        seed alike before the module is made, or load values afterwards.
    Cost: an all-reduce of 40 bytes per unit, once; per step an all-gather per unit in forward and backward,
        and a reduce-scatter of its gradients.
    Source: torch's `fully_shard`.
    """
    unit = one_unit(module)
    with agreed("parallelize_fsdp", unit, mesh) as said:
        options = by_name(fully_shard_args, fully_shard_kwargs)
        axes = named_axes(mesh, "parallelize_fsdp", unit, options["ignored_params"])
        if len(axes) > 2:
            raise ParallelError(
                f"parallelize_fsdp takes one or two axes, got {axes}; "
                f"place {axes[1]!r} with parallelize_replicate first"
            )
        asked = asked_of("parallelize_fsdp", unit, mesh, axes, options, said)
    shard_over(unit, mesh, asked)
    return module


@dataclass(frozen=True, slots=True)
class Asked:
    """What a call asks for, looked at.

    Args: left_alone: parameters that it does not place. answers: those of `shard_placement_fn`.
    """

    axes: tuple[str, ...]
    left_alone: set[nn.Parameter]
    answers: Mapping[Any, Any]
    options: dict[str, Any]


def asked_of(
    verb: str, module: nn.Module, mesh: DeviceMesh, axes: tuple[str, ...], options: dict[str, Any], said: Said
) -> Asked:
    """Sharding over the last of `axes`, looked at; says to the other ranks what it is.

    Raises: ParallelError: what cannot be.
    """
    for each in members(module):
        _refuse_unit(verb, each, axes[-1])
        _refuse_container(verb, each)
    refuse_other_order(mesh, axes[-1], verb)
    shard_mesh = on_axes(mesh, axes[-1:])
    slots = [slot for slot in slots_of(module) if _is_free(slot, axes[-1])]
    elsewhere = [slot for slot in slots if _is_elsewhere(slot, mesh, shard_mesh)]
    not_asked = spread_over(module, mesh) | options.pop("ignored_params")
    left_alone = not_asked.union(slot.get() for slot in elsewhere)
    taken = [slot for slot in slots if slot.get() not in left_alone]
    said.options, said.left_alone, said.over = {**options}, left_alone, axes[-1]
    said.cut = dict.fromkeys(slot.get() for slot in taken if slot.get().ndim)
    _refuse_partly_sharded(module, mesh, axes)
    _refuse_partly_cut(module, shard_mesh, left_alone)
    _refuse_shared_with_another_unit(module)
    _refuse_twice(slots, axes, left_alone)
    _refuse_what_torch_cannot(taken)
    _refuse_fewer_ranks(taken, options.get("reshard_after_forward"), shard_mesh.size())
    refuse_placed_elsewhere(taken, module, verb)
    ask = options.pop("shard_placement_fn", None)
    _refuse_named([slot for slot in elsewhere if slot.get() not in not_asked], ask)
    return Asked(axes, left_alone, _answers(taken, ask, shard_mesh), options)


def shard_over(module: nn.Module, mesh: DeviceMesh, asked: Asked) -> None:
    """Shard the parameters of a unit over the last of the axes, replicate them over the others."""
    if not members(module):
        return
    axes, left_alone, shard_mesh = asked.axes, asked.left_alone, on_axes(mesh, asked.axes[-1:])
    watch_steps()
    with ties_kept(module, "parallelize_fsdp"):
        if rest := axes[:-1]:
            whole = (Replicate(),) * len(rest)
            place_parameters(
                module, mesh[rest], whole, rest, skip=lambda p: p in left_alone or unit_of(p) != ""
            )
        scalars = _replicate_scalars(module, shard_mesh, left_alone)
        slots = [slot for slot in slots_of(module) if _is_free(slot, axes[-1])]
        # torch finds units inside by one path; a module that is registered by another it would take again.
        inside = {slot.get() for slot in slots_of(module) if unit_of(slot.get()) == axes[-1]}
        ignored = {"ignored_params": left_alone | scalars | inside}
        _shard(module, shard_mesh, slots, asked.answers, {**asked.options, **ignored})


def _answers(slots: Sequence[Slot], ask: Any, mesh: DeviceMesh) -> dict[tuple[nn.Module, str], Any]:
    """What `shard_placement_fn` says of the caller's own parameters: others stand in their places later."""
    parameters = {slot.get(): slot.path for slot in slots if ask is not None and slot.get().ndim}
    said = {p: _on(mesh, ask(p), path, p.ndim) for p, path in parameters.items()}
    return {(slot.owner, slot.name): said.get(slot.get()) for slot in slots}


def _refuse_named(slots: Sequence[Slot], ask: Any) -> None:
    """Raise ParallelError where `shard_placement_fn` names a mesh for what is left alone on other axes."""
    for slot in slots:
        info = getattr(ask(slot.get()), "mesh_info", None) if ask is not None else None
        if info is not None:
            module = slot.path.rpartition(".")[0] or "its module"
            raise ParallelError(
                f"{slot.path}: shard_placement_fn names the axes {axis_names(info.mesh)} for a parameter on "
                f"{layout_of(slot.get()).axes}, of which this call cuts none\n"
                f"  fix: cut {module} over these axes by a call of its own, before this one"
            )


def _on(mesh: DeviceMesh, answer: Any, path: str, ndim: int) -> Any:
    """The placement alone. Raises: ParallelError: it is none, or to be on another mesh."""
    info = getattr(answer, "mesh_info", None)
    if info is not None and info.mesh != mesh:
        raise ParallelError(
            f"{path}: shard_placement_fn names the axes {axis_names(info.mesh)}, and the unit is cut over "
            f"{axis_names(mesh)}\n  fix: place the module of this parameter by a call of its own"
        )
    placement = getattr(answer, "placement", answer)
    if placement is not None and not (isinstance(placement, TorchShard) and -ndim <= placement.dim < ndim):
        raise ParallelError(
            f"{path}: shard_placement_fn says {placement!r:.60} of a parameter of {ndim} dims\n"
            f"  fix: a Shard of one of the dims 0 to {ndim - 1}, or None, which cuts dim 0"
        )
    return placement


def _refuse_unit(verb: str, module: nn.Module, axis: str) -> None:
    if isinstance(module, FSDPModule):
        raise ParallelError(
            f"{verb}: axis {axis!r} places this module already: {type(module).__name__} is a "
            "sharded unit; apply a strategy once per parameter and axis"
        )


def _refuse_container(verb: str, module: nn.Module) -> None:
    modules = isinstance(module, nn.ModuleList | nn.ModuleDict)
    if modules or isinstance(module, nn.ParameterList | nn.ParameterDict):
        instead = "each of its members" if modules else "the module whose forward reads them"
        raise ParallelError(
            f"{verb}: a {type(module).__name__} has no forward around which its parameters could "
            f"be gathered\n  fix: shard {instead}"
        )


def _refuse_what_torch_cannot(slots: Sequence[Slot]) -> None:
    """Raise ParallelError for what `fully_shard` takes and fails at, or ignores, when the unit runs."""
    refuse_sparse_gradients(slots)
    dtypes: dict[torch.dtype, str] = {}
    for slot in slots:
        parameter = slot.get()
        if parameter.requires_grad:
            dtypes.setdefault(parameter.dtype, slot.path)
        if parameter.ndim and _is_empty_somewhere(parameter):
            raise ParallelError(
                f"{slot.path}: a rank holds nothing of it ({told(parameter)}), and torch's fully_shard "
                "cannot cut nothing\n  fix: leave it out with ignored_params, or place it so that every rank "
                "has a part"
            )
        if parameter._backward_hooks:
            raise ParallelError(
                f"{slot.path}: torch's fully_shard never runs the hooks of Tensor.register_hook; use "
                "register_post_accumulate_grad_hook, which sees the sharded gradient"
            )
    if len(dtypes) > 1:
        said = ", ".join(f"{path} is {dtype}" for dtype, path in dtypes.items())
        raise ParallelError(
            f"a sharded unit gathers parameters of one dtype, and {said}\n"
            "  fix: shard the modules of each dtype as units of their own, then the root"
        )


def _refuse_fewer_ranks(slots: Sequence[Slot], reshard: object, size: int) -> None:
    """Raise ParallelError for ranks that torch could not cut over between the passes, and for DTensors."""
    if isinstance(reshard, bool) or not isinstance(reshard, int):
        return
    if reshard < 1 or size % reshard:
        raise ParallelError(
            f"reshard_after_forward={reshard} does not divide the {size} ranks\n"
            "  fix: True, False, None, or a number of ranks that divides them"
        )
    if reshard == size:
        return
    for slot in slots:
        parameter = slot.get()
        inner = kept_spec(as_ours(parameter)._spec) if isinstance(parameter, TorchDTensor) else None
        if inner is not None:
            raise ParallelError(
                f"{slot.path}: it computes as a DTensor on {axis_names(inner.mesh)}, and between forward and "
                f"backward torch's fully_shard cuts over {reshard} of {size} ranks plain tensors only\n"
                "  fix: reshard_after_forward=True, or False"
            )


def _is_empty_somewhere(parameter: nn.Parameter) -> bool:
    if not isinstance(parameter, TorchDTensor):
        return not parameter.numel()
    return _has_empty_part(as_ours(parameter)._spec.layout)


@remembered(4096)
def _has_empty_part(layout: Layout) -> bool:
    pairs = zip(layout.placements, layout.sizes, strict=True)
    coords = product(*(range(n) if p.is_partition else (0,) for p, n in pairs))
    return any(0 in layout.local_shape(each) for each in coords)


def _is_free(slot: Slot, axis: str) -> bool:
    """Not taken by a `fully_shard` of a child."""
    parameter = slot.get()
    return not (isinstance(parameter, TorchDTensor) and unit_of(parameter) == axis)


def _is_elsewhere(slot: Slot, mesh: DeviceMesh, shard_mesh: DeviceMesh) -> bool:
    parameter = slot.get()
    if not isinstance(parameter, TorchDTensor) or goes_within(parameter, shard_mesh, mesh):
        return False
    held = parameter.device_mesh
    if not parameter.ndim and axis_names(shard_mesh)[0] not in axis_names(held):
        inside = beside_in(shard_mesh, parameter) != shard_mesh
        return ranks_of(mesh) <= ranks_of(held) or (not inside and is_other_view(slot.path, held, mesh))
    return is_other_view(slot.path, held, mesh)


def _refuse_twice(slots: list[Slot], axes: tuple[str, ...], ignored: set[nn.Parameter]) -> None:
    for slot in slots:
        parameter = slot.get()
        if parameter in ignored or not isinstance(parameter, TorchDTensor):
            continue
        if unit := unit_of(parameter):
            raise ParallelError(
                f"{slot.path}: it belongs to a sharded unit on axis {unit!r} already; a parameter belongs to "
                "one unit: shard it over one axis, and replicate it over others with parallelize_hsdp"
            )
        refuse_twice(slot.path, as_ours(parameter), axes)


def _refuse_shared_with_another_unit(module: nn.Module) -> None:
    """Raise ParallelError for a sharded parameter that no unit inside holds: one beside this module does."""
    units = [m for m in module.modules() if m is not module and isinstance(m, FSDPModule)]
    inside = {part for unit in units for part in unit.modules()}
    for slot in slots_of(module):
        unit = unit_of(slot.get())
        if unit and slot.owner not in inside:
            raise ParallelError(
                f"{slot.path}: another sharded unit on axis {unit!r} uses this parameter too; a parameter "
                "belongs to one unit, which gathers and sums it: shard a module that holds both users, or"
                " both as one unit, [a, b]"
            )


def _replicate_scalars(module: nn.Module, mesh: DeviceMesh, ignored: set[nn.Parameter]) -> set[nn.Parameter]:
    """Replicate what `fully_shard` cannot cut, parameters without dims; all of those in this unit."""

    def is_left(parameter: nn.Parameter) -> bool:
        return parameter.ndim > 0 or parameter in ignored or unit_of(parameter) != ""

    (axis,) = axis_names(mesh)
    homes = {s.get(): beside_in(mesh, s.get()) for s in slots_of(module) if not is_left(s.get())}
    for home in dict.fromkeys(homes.values()):
        axes, others = axis_names(home), {p for p in module.parameters() if homes.get(p) != home}
        place_parameters(module, home, (Replicate(),) * len(axes), axes, skip=others.__contains__)
    scalars = {slot.get() for slot in slots_of(module) if slot.get().ndim == 0}
    for scalar in (s for s in scalars if not is_left(s)):  # also one that an axis of one rank left as it was
        if mesh.size() == 1 or (isinstance(scalar, TorchDTensor) and axis in axis_names(scalar.device_mesh)):
            scalar._fully_sharded = axis  # type: ignore[attr-defined]
    return scalars


def _refuse_partly_sharded(module: nn.Module, mesh: DeviceMesh, axes: tuple[str, ...]) -> None:
    """Raise ParallelError for what a unit inside holds on fewer axes: nobody would sum its gradient."""
    for slot in slots_of(module):
        parameter = slot.get()
        if unit_of(parameter) != axes[-1] or not isinstance(parameter, TorchDTensor):
            continue
        held = axis_names(parameter.device_mesh)
        missing = [axis for axis in axes if axis not in held and on_axes(mesh, (axis,)).size() > 1]
        if missing:
            raise ParallelError(
                f"{slot.path}: a sharded unit holds it on {held}, without axis "
                f"{missing[0]!r}; apply the same call to the parts and to the root"
            )


def _refuse_partly_cut(module: nn.Module, mesh: DeviceMesh, left_alone: Container[nn.Parameter]) -> None:
    """Raise ParallelError where activations of a part alone are cut over ranks of `mesh`.

    The ranks that share a sequence compute terms of the gradients in that part, and of all others the whole.
    """
    over, ranks = cut_over(module), ranks_of(mesh)
    slots = [slot for slot in slots_of(module) if slot.get() not in left_alone]
    cut = {s.path: tuple(a for a, those in over[s.get()].items() if those <= ranks) for s in slots}
    within = next((axes for axes in cut.values() if axes), ())
    whole = [path for path, axes in cut.items() if not axes]
    if within and whole:
        raise ParallelError(
            f"{whole[0]}: {axis_names(mesh)} holds the ranks of {within}, which cut the activations of a "
            "part of the model only, and each of these ranks has the whole gradient of what is outside: it "
            "would count once for each\n  fix: parallelize_context of the model that holds both, or units "
            f"over axes without the ranks of {within}"
        )


def _shard(
    module: nn.Module, mesh: DeviceMesh, slots: list[Slot], answers: Mapping[Any, Any], kwargs: dict[str, Any]
) -> None:
    """Hand the local tensors to `fully_shard`, then label what it made by what each parameter was before."""
    taken = [slot for slot in slots if slot.get() not in kwargs["ignored_params"]]
    where = {(slot.owner, slot.name): slot.get() for slot in taken}
    cut = cut_over(module)
    plain: dict[nn.Parameter, nn.Parameter] = {}
    for old in dict.fromkeys(where.values()):
        plain[old] = nn.Parameter(local_plain(old).contiguous(), requires_grad=old.requires_grad)
    said = {plain[old]: answers.get(place) for place, old in where.items()}
    put_all(slots, plain)
    parts = members(module)
    kinds = [type(part) for part in parts]
    fully_shard(parts if len(parts) > 1 else parts[0], mesh=mesh, shard_placement_fn=said.get, **kwargs)
    unit = parts[0]  # several share one state
    show_sharded_between(unit, refuse_lost, refuse_hidden)
    begin_before_bases(unit, refuse_graph)
    for part, kind in zip(parts, kinds, strict=True):
        # Libraries find what they know of a class by how it reads (`transformers`: its recorded states).
        type(part).__module__, type(part).__qualname__ = kind.__module__, kind.__qualname__
        follow_unit(part, alone=len(parts) == 1 and kwargs.get("reshard_after_forward") is None)
    follow_several(parts)
    _sum_gradients(unit)
    record_sharded_traffic(unit, axis_names(mesh)[0])
    follow_dtype(unit)
    serve_direct_calls(unit, (owner for owner, _ in where if owner not in parts))
    for managed in fsdp_parameters(unit):
        old = where[(managed.owner, managed.name)]
        _relabel(managed, old, mesh, cut[old])
        carry_over(old, managed.parameter)


def _sum_gradients(module: nn.Module) -> None:
    if isinstance(module, FSDPModule):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(enable=True)  # gloo has no premultiplied sum


def _relabel(managed: FsdpParameter, old: nn.Parameter, mesh: DeviceMesh, cut: Iterable[str]) -> None:
    """Give the sharded parameter and its gradients the layouts that they truly have, in our class."""
    lies = sharded_layouts(old, mesh, managed.dim, managed.local.dtype, cut)
    grad = lies.gradient.layout

    def make_grad(local: torch.Tensor) -> torch.Tensor:
        return wrap(local, spec_of(with_dtype(grad, local.dtype), lies.gradient.mesh))

    new = nn.Parameter(wrap(managed.local, lies.value), requires_grad=managed.parameter.requires_grad)
    new._fully_sharded = axis_names(mesh)[0]  # type: ignore[attr-defined]
    seen = lies.inner
    inside = None if seen is None else Inside(partial(_wrap_inner, spec=seen), lies.inner_gradient)
    pending = tuple(a for a, p in zip(grad.axes, grad.placements, strict=True) if p.is_pending)
    managed.adopt(new, make_grad, partial(as_term, layout=grad), inside, pending)


def _wrap_inner(local: torch.Tensor, spec: Spec) -> torch.Tensor:
    layout = with_dtype(spec.layout, local.dtype)
    return wrap(local, spec_of(layout, spec.mesh))

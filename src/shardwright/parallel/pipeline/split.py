"""Taking from a model what other ranks hold."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import axis_names, intercept_calls
from shardwright.errors import ParallelError
from shardwright.grads.stages import SharedByStages, note_cut
from shardwright.parallel.pipeline.border import Leaf
from shardwright.parallel.pipeline.forward.conductor import Conductor, Elsewhere
from shardwright.parallel.pipeline.forward.held import Held, held
from shardwright.parallel.pipeline.forward.hollow import Call, HollowMode, Value, hollow, mark
from shardwright.parallel.pipeline.forward.leavings import Leavings
from shardwright.parallel.pipeline.forward.outside import Outside
from shardwright.parallel.pipeline.forward.recording import hook_recorders, record_elsewhere
from shardwright.parallel.pipeline.mark import ATTRIBUTE
from shardwright.parallel.pipeline.places import VERB, Place, Places
from shardwright.parallel.pipeline.serving import Units
from shardwright.tensor.modules.more_axes import shared_ranks
from shardwright.tensor.modules.replaced import taken_away
from shardwright.tensor.modules.slots import Slot, slots_of


@dataclass
class Split:
    """How a model is cut: which stages this rank runs, and who hears the calls of its parts.

    shared: names of the parameters that several ranks hold, and these ranks, that of the first stage first.
    reads_parameters: whether modules above the cuts have parameters of their own. parts: the place of each
    part. outside: the globals and the like that its code names. units: the sharded ones. facts: what hangs on
    the parameters of this rank.
    """

    mesh: DeviceMesh
    stages: int
    mine: tuple[int, ...]
    rank_of: tuple[int, ...]
    conductor: Conductor
    mode: HollowMode
    above: list[nn.Module]
    shared: list[tuple[tuple[str, ...], tuple[int, ...]]]
    reads_parameters: bool
    parts: dict[str, Place] = field(default_factory=dict)
    outside: Outside = field(default_factory=Outside)
    units: Units = field(default_factory=Units)
    facts: list[tuple[Slot, dict[str, object]]] = field(default_factory=list)

    @property
    def heard(self) -> list[Held]:
        """The parts of this rank, whose calls are heard."""
        return self.conductor.heard

    @functools.cached_property
    def leavings(self) -> Leavings:
        """What forwards set in modules."""
        return Leavings(self.part_of)

    def hollow_on(self, device: torch.device) -> Callable[[Leaf], Tensor]:
        """Makes tensors with a shape, and no values."""
        return lambda leaf: hollow(self.mode, leaf, device)

    def part_of(self, path: str) -> str | None:
        """The path of the part that this module is in, None above the cuts."""
        return next((p for p in self.parts if path == p or path.startswith(f"{p}.")), None)

    def hear(self) -> None:
        """Hear the calls of this rank's parts, also of those that were compiled since."""
        for part in self.heard:
            module = part.module
            if module is not None and getattr(module._compiled_call_impl, "heard_by", None) is None:
                intercept_calls(module, functools.partial(self.conductor.hears, part))

    def tell_parameters(self) -> None:
        """Hang on this rank's parameters what is known of them; `module.to()` puts others in their places."""
        for slot, facts in self.facts:
            parameter = slot.owner._parameters.get(slot.name)
            if parameter is not None:
                vars(parameter).update({**facts, **vars(parameter)})

    def read_code(self, loss: object) -> None:
        """Find what the code of the layers names, and that above them and of the loss too."""
        parts = [held.module for held in self.conductor.parts if held.module is not None]
        self.outside = Outside.of(parts, self.above, loss, self.stages - 1)

    def place_leavings(self, model: nn.Module) -> None:
        """Put stand-ins where this rank does not know what a forward sets."""
        self.leavings.place(model, self.conductor.parts, self.mesh.get_local_rank())


def find_split(module: nn.Module) -> Split | None:
    """How this module was cut into stages, None if it was not."""
    split: Split | None = module.__dict__.get(ATTRIBUTE)
    return split


def refuse_placed(module: nn.Module, mesh: DeviceMesh) -> None:
    """Raise ParallelError for what `fully_shard` manages, or what lies on ranks that get other stages."""
    for slot in slots_of(module):
        parameter = slot.get()
        if isinstance(parameter, TorchDTensor) and shared_ranks(parameter.device_mesh, mesh):
            raise ParallelError(
                f"{VERB}: {slot.path} is placed on {axis_names(parameter.device_mesh)}, whose ranks would "
                f"hold other stages over {axis_names(mesh)[0]!r}; place it on other axes, such as mesh['dp']"
            )
        if getattr(parameter, "_fully_sharded", ""):
            raise ParallelError(
                f"{VERB}: {slot.path} is sharded already; cut the model into stages before parallelize_fsdp "
                "and parallelize_hsdp"
            )


def take_apart(model: nn.Module, mesh: DeviceMesh, places: Places, rank_of: Sequence[int]) -> Split:
    """Leave in the model what this rank holds; say of each parameter who counts it."""
    hook_recorders(model)
    me = mesh.get_local_rank()
    mine = tuple(stage for stage, rank in enumerate(rank_of) if rank == me)
    mode = HollowMode()
    shared = _shared(places, rank_of)
    split = Split(
        mesh=mesh,
        stages=places.stages,
        mine=mine,
        rank_of=tuple(rank_of),
        conductor=Conductor(),
        mode=mode,
        above=places.above,
        shared=list(shared.values()),
        reads_parameters=any(place.is_parameter for place in places.parts),
        parts={place.path: place for place in places.of_modules()},
    )
    holders = _holders(places, rank_of)
    here_too = [p.part() for p in places.of_modules() if set(p.stages) & set(mine)]
    kept = {id(module) for part in here_too for module in part.modules()}
    before = [(slot.get(), slot.path) for slot in slots_of(model)]
    for place in places.parts:
        here = bool(set(place.stages) & set(mine))
        if place.is_parameter:
            if not here:
                _hollow_parameter(place, mode)
        elif here:
            if all(part.module is not place.part() for part in split.heard):
                split.heard.append(_all_stages(place, places))
        else:
            _leave(place, places, split, kept)
    split.hear()
    left = {id(slot.get()) for slot in slots_of(model)}
    for parameter, name in before:
        if id(parameter) not in left:
            taken_away(parameter, name)
    for slot in slots_of(model):
        found = id(slot.get())
        facts: dict[str, object] = {"shared_by_stages": SharedByStages(mesh, counts=holders[found][0] == me)}
        if found in shared:
            facts["names_in_stages"] = shared[found][0]
        split.facts.append((slot, facts))
    split.tell_parameters()
    model.__dict__[ATTRIBUTE] = split
    model.register_state_dict_pre_hook(_tell_parameters)
    note_cut(mesh)
    return split


def _tell_parameters(model: nn.Module, _prefix: str, _keep_vars: bool) -> None:
    """Before a checkpoint reads them."""
    split = find_split(model)
    if split is not None:
        split.tell_parameters()


def _all_stages(place: Place, places: Places) -> Held:
    """A part with the stages of all places where its module stands."""
    part = held(place)
    part.stages = tuple(sorted({s for p in places.of_modules() if p.key == place.key for s in p.stages}))
    return part


def _leave(place: Place, places: Places, split: Split, kept: set[int]) -> None:
    """Take a part away; `kept` are the modules of this rank's parts, of which it may hold some as well."""
    module = place.part()
    part = _all_stages(place, places)
    split.conductor.absentees.append(part)
    place.parent._modules[place.name] = stand_in = Elsewhere(split.conductor, part, module)
    record_elsewhere(module, stand_in)
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None and id(child) not in kept:
                child._parameters[name] = _emptied(parameter, f"{place.path}.{name}", split.mode)


def _emptied(parameter: Tensor, path: str, mode: HollowMode) -> nn.Parameter:
    stand_in = hollow(mode, Leaf(tuple(parameter.shape), parameter.dtype), parameter.device)
    empty = nn.Parameter(stand_in, requires_grad=False)
    mark(empty, frozenset([Value(Call(path, -1), 0)]))
    return empty


def _hollow_parameter(place: Place, mode: HollowMode) -> None:
    """A parameter of a module above the cuts, that another rank holds: its code still reads the name."""
    parameter = place.parent._parameters.pop(place.name)
    if parameter is not None:
        place.parent.__dict__[place.name] = _emptied(parameter, place.path, mode)


def _holders(places: Places, rank_of: Sequence[int]) -> dict[int, list[int]]:
    """Identity of each parameter -> the ranks that hold it, that of its first stage first."""
    found: dict[int, dict[int, None]] = {}
    for stage in range(places.stages):
        for place in places.parts:
            if stage in place.stages:
                for parameter in _parameters(place):
                    found.setdefault(id(parameter), {})[rank_of[stage]] = None
    return {key: list(ranks) for key, ranks in found.items()}


def _shared(places: Places, rank_of: Sequence[int]) -> dict[int, tuple[tuple[str, ...], tuple[int, ...]]]:
    """Parameters that several ranks hold: their names, and the ranks."""
    holders = _holders(places, rank_of)
    names: dict[int, list[str]] = {}
    for place in places.parts:
        if place.is_parameter:
            names.setdefault(id(place.parent._parameters[place.name]), []).append(place.path)
            continue
        for name, parameter in place.part().named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(f"{place.path}.{name}")
    return {
        key: (tuple(dict.fromkeys(names[key])), tuple(ranks))
        for key, ranks in holders.items()
        if len(ranks) > 1
    }


def _parameters(place: Place) -> list[Tensor]:
    if place.is_parameter:
        parameter = place.parent._parameters.get(place.name)
        return [] if parameter is None else [parameter]
    return list(place.part().parameters())

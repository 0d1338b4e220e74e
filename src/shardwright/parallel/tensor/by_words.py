"""A plan of words, applied: every parameter that it names is placed, all or none."""

from __future__ import annotations

import fnmatch
import glob
import warnings
from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import axis_names
from shardwright.errors import ParallelError
from shardwright.layout.of_tensor import layout_of
from shardwright.moe.cut_tokens import computes_locally
from shardwright.parallel.tensor.adapters import with_adapters
from shardwright.parallel.tensor.borders import hang, of_embeddings
from shardwright.parallel.tensor.cuts import placement_of
from shardwright.parallel.tensor.said import Said, Spoken, spoken
from shardwright.parallel.tensor.sequence import of_the_stream, read_blocks
from shardwright.placement.base import Placement
from shardwright.tensor.modules.distribute import place_by_pattern
from shardwright.tensor.modules.more_axes import comes_in_terms
from shardwright.tensor.modules.slots import slots_of
from shardwright.tensor.placements import PlacementsArgument


def place_by_words(
    module: nn.Module,
    mesh: DeviceMesh,
    words: Mapping[str, str],
    placed: Mapping[str, PlacementsArgument],
    source: int | None,
    *,
    strict: bool,
    sequence: bool,
) -> nn.Module:
    """Place the parameters as the words say, or as `placed` says by name; every other one is whole.

    Args:
        source: see `distribute_tensor`.
        strict: refuse patterns without effect; else they are passed over, as plans that a family of models
            shares have some for each of its members.
        sequence: between the blocks, the stream is cut along the sequence.
    """
    said = with_adapters(module, spoken(module, words, strict=strict))
    _refuse_placed(said, mesh)
    cuts = _placements(module, said, placed, mesh.size())
    _tell_idle(module, said, cuts)
    sequence = sequence or any(word.sequence for word in said.modules.values())
    borders = of_embeddings(module)
    if sequence:
        borders |= read_blocks(module, said, cuts)
    (axis,) = axis_names(mesh)
    by_name = {glob.escape(name): {axis: placement} for name, placement in cuts.items()}
    place_by_pattern(module, mesh, {**placed, **by_name}, source, "parallelize_tensor")
    if sequence and mesh.size() > 1:
        cut = set(of_the_stream(module, borders))
        for slot in slots_of(module):
            here: object = slot.get()
            takes_its_tokens = isinstance(here, TorchDTensor) and computes_locally(here)  # an expert
            if takes_its_tokens or slot.owner in cut:
                comes_in_terms(slot.owner, slot.name, mesh)
    hang(borders, mesh)
    return module


def _placements(
    module: nn.Module, said: Spoken, placed: Mapping[str, PlacementsArgument], n: int
) -> dict[str, Placement]:
    """`{name of a parameter: placement}` of those that a word reaches, under all names of a tied one."""
    chosen: dict[nn.Parameter, tuple[Said, Placement]] = {}
    for each in said.parameters:
        if any(fnmatch.fnmatchcase(each.name, pattern) for pattern in placed):
            continue
        parent = module.get_submodule(each.home.rpartition(".")[0])
        placement = placement_of(each, parent, n)
        first = chosen.setdefault(each.parameter, (each, placement))
        if first[1] != placement:
            _differ(first, (each, placement), strict=said.strict)
    names: dict[int, list[str]] = {id(p): [] for p in chosen}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in names:
            names[id(parameter)].append(name)
    return {name: placement for p, (_, placement) in chosen.items() for name in names[id(p)]}


def _differ(first: tuple[Said, Placement], second: tuple[Said, Placement], *, strict: bool) -> None:
    """Two names of one parameter for which the plan has two words."""
    text = (
        f"parallelize_tensor: {first[0].name} and {second[0].name} are one parameter (tied weights), and the "
        f"plan says {first[1]} by {first[0].pattern!r} and {second[1]} by {second[0].pattern!r}"
    )
    if strict:
        raise ParallelError(f"{text}; give both the same word")
    warnings.warn(f"{text}; it is placed by the first", stacklevel=5)


def _refuse_placed(said: Spoken, mesh: DeviceMesh) -> None:
    """A parameter that this axis, or `fully_shard`, has placed already."""
    (axis,) = axis_names(mesh)
    for each in said.parameters:
        if isinstance(each.parameter, TorchDTensor):
            layout = layout_of(each.parameter)
            if axis in layout.axes:
                raise ParallelError(
                    f"parallelize_tensor: axis {axis!r} places {each.name} already ({layout}); apply tensor "
                    "parallelism once per parameter"
                )


def _tell_idle(module: nn.Module, said: Spoken, cuts: Mapping[str, Placement]) -> None:
    """Warn of a plan that a model brings and that does less than it says."""
    brings = f"parallelize_tensor: the plan that {type(module).__name__} brings cuts"
    if said.idle:
        names = ", ".join(said.idle)
        warnings.warn(
            f"{brings} {names}, which have no parameters of their own: nothing is cut there", stacklevel=4
        )
    cut = [name for name, placement in cuts.items() if placement.is_partition]
    if not said.strict and not any(_in_a_list(module, name) for name in cut):
        warnings.warn(
            f"{brings} nothing in its blocks, but {', '.join(cut) or 'nothing'}; write words for them",
            stacklevel=4,
        )


def _in_a_list(module: nn.Module, name: str) -> bool:
    """Is the parameter of a module that stands in a list, as blocks do?"""
    path = name.split(".")[:-1]
    above = (module.get_submodule(".".join(path[:depth])) for depth in range(len(path)))
    return any(isinstance(each, nn.ModuleList) for each in above)

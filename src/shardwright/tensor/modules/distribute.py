"""`distribute_module`: the parameters and buffers of a module become DTensors."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat.dynamo import never_traced
from shardwright.errors import ParallelError, refuse_other_kind
from shardwright.placement.base import Placement, Replicate
from shardwright.tensor.conversions import current_mesh
from shardwright.tensor.distribute import distribute_tensor, refuse_source
from shardwright.tensor.modules.more_axes import KEPT, is_free_for, on_more_axes
from shardwright.tensor.modules.same_model import agreed, tells_errors
from shardwright.tensor.modules.ties import ties_kept
from shardwright.tensor.placements import PlacementsArgument, resolve_placements
from shardwright.tensor.wrap import as_ours

PartitionFn = Callable[[str, nn.Module, DeviceMesh], None]
ByPattern = Mapping[str, PlacementsArgument]

_resolved = partial(resolve_placements, default="replicate")


@never_traced("distribute_module replaces parameters, which no graph holds; fix: compile its result")
def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: PartitionFn | ByPattern | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Make every parameter and buffer a DTensor on `device_mesh`, in place; tied weights stay tied.

    Args:
        partition_fn: as torch's function `(name, submodule, mesh)`, or `{pattern: placements}`: a shell
            pattern over qualified parameter and buffer names ("layers.*.wq.weight"); the first that matches
            wins. What nothing names is replicated.
        input_fn: `(module, inputs, mesh) -> inputs`, before the forward.
        output_fn: `(module, outputs, mesh) -> outputs`, after it.
        src_data_rank: see `distribute_tensor`.
    A parameter that `parallelize_replicate` placed on other axes gets those of `device_mesh` too.

    Raises: ParallelError: a pattern that matches nothing, or names what is placed in another way already, a
        placement that does not fit, a module that was distributed before, a tied weight whose names would be
        placed differently, ranks with other parameters, buffers or placements; nothing has been changed then.
    Cost: an all-reduce of 40 bytes over each axis (two of them with a function), and that of
        `distribute_tensor` per parameter, which is none with `src_data_rank=None`.
    """
    mesh, verb = current_mesh(device_mesh), "distribute_module"
    function = None if isinstance(partition_fn, Mapping) else partition_fn
    patterns = partition_fn if isinstance(partition_fn, Mapping) else {}
    with agreed(verb, module, mesh) as told:
        _check_arguments(module, function, input_fn, output_fn)
        refuse_source(mesh, src_data_rank)
        hooks = {"input_fn": input_fn, "output_fn": output_fn}
        told.options = {"src_data_rank": src_data_rank, "partition_fn": function, **hooks}
        told.becomes = placements_by(patterns, module, mesh)
    with _once(module, verb):
        if function is not None:
            with tells_errors(verb, module, mesh):
                for name, child in module.named_modules():
                    function(name, child, mesh)
            with agreed(verb, module, mesh) as told:  # what it has left plain is sent
                told.becomes = placements_by({}, module, mesh)
        _place(module, mesh, patterns, src_data_rank, verb)
    _register_hooks(module, mesh, input_fn, output_fn)
    return module


def _check_arguments(module: object, function: object, input_fn: object, output_fn: object) -> None:
    if not isinstance(module, nn.Module):
        raise ParallelError(f"distribute_module places a module, got {type(module).__name__}")
    if not (function is None or callable(function)):
        raise ParallelError(f"distribute_module takes {{pattern: placements}}, got {function!r:.60}")
    for name, hook in (("input_fn", input_fn), ("output_fn", output_fn)):
        kinds, fix = (Callable, type(None)), "a function, or None"
        refuse_other_kind(f"distribute_module: {name}", hook, kinds, ParallelError, fix=fix)


def place_by_pattern(
    module: nn.Module,
    mesh: DeviceMesh,
    patterns: ByPattern,
    source: int | None = 0,
    said: str = "distribute_module",
) -> None:
    """What `distribute_module` does with a plan, once the ranks agree. said: the function that was called."""
    with _once(module, said):
        _place(module, mesh, patterns, source, said)


@contextmanager
def _once(module: nn.Module, said: str) -> Iterator[None]:
    """Around the placing of a whole module. Raises: ParallelError: it has been placed already."""
    before = getattr(module, "_shardwright_distributed", "")
    if before:
        again = "was already called" if before == said else f"after {before}"
        raise ParallelError(f"{said} {again} on this module; place its parts, or place it once")
    with ties_kept(module, said):
        yield
    module._shardwright_distributed = said  # type: ignore[assignment]


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Qualified names of parameters and buffers, each name of a tied one included."""
    named: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    named.update(module.named_buffers(remove_duplicate=False))
    return named


def placements_by(patterns: ByPattern, module: nn.Module, mesh: DeviceMesh) -> dict[str, str]:
    """What patterns make of each parameter and buffer of a module, in words; "" of what stays whole.

    Raises: ParallelError, LayoutError: a pattern that matches nothing, a placement that does not fit.
    """
    named = _tensors(module)
    _check_patterns(patterns, named)
    return {name: _words(*_resolved(mesh, _placements_for(name, patterns, mesh))) for name in named}


def _words(placements: tuple[Placement, ...], order: tuple[str, ...] | None) -> str:
    whole = all(placement.is_replicated for placement in placements)
    return "" if whole else f"{placements}" + (f" in the order {order}" if order else "")


def _place(module: nn.Module, mesh: DeviceMesh, patterns: ByPattern, source: int | None, said: str) -> None:
    named = _tensors(module)
    _check_patterns(patterns, named)
    chosen = {name: _placements_for(name, patterns, mesh) for name in named}
    asked = _asked(named, patterns, chosen, mesh, said)
    made: dict[int, torch.Tensor] = {}
    for name, tensor in named.items():
        by_name = asked.get(id(tensor), name)
        given = chosen[by_name]
        named_by = said if id(tensor) in asked else ""
        if id(tensor) not in made and _to_be_placed(by_name, tensor, mesh, given, named_by):
            made[id(tensor)] = _distributed(by_name, tensor, mesh, given, source)
    for name, tensor in named.items():
        if id(tensor) in made:
            _set(module, name, made[id(tensor)])


def _asked(
    named: Mapping[str, torch.Tensor],
    patterns: ByPattern,
    chosen: Mapping[str, PlacementsArgument],
    mesh: DeviceMesh,
    said: str,
) -> dict[int, str]:
    """The name by which each tensor is asked for: of a tied one the first that a pattern names.

    Raises: ParallelError: two names of one tensor are placed differently.
    """
    asked: dict[int, str] = {}
    for name, tensor in named.items():
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            continue
        first = asked.setdefault(id(tensor), name)
        one, other = (_resolved(mesh, chosen[n]) for n in (first, name))
        if one != other:
            raise ParallelError(
                f"{said}: {first} and {name} are one parameter (tied weights), and the plan "
                f"places them differently, {list(one[0])} and {list(other[0])}; give both the same placements"
            )
    return asked


def _placements_for(name: str, patterns: ByPattern, mesh: DeviceMesh) -> PlacementsArgument:
    for pattern, given in patterns.items():
        if fnmatch.fnmatchcase(name, pattern):
            _resolved(mesh, given)  # refuses before anything is changed
            return given
    return (Replicate(),) * mesh.ndim


def _to_be_placed(
    name: str, tensor: torch.Tensor, mesh: DeviceMesh, placements: PlacementsArgument, named_by: str
) -> bool:
    """Is there anything to do? What is placed already stays, unless the plan asks for something else.

    Args: named_by: whose plan names it; "" if none does.
    Raises: ParallelError: it does, and that cannot be done.
    """
    if not isinstance(tensor, TorchDTensor):
        return True
    ours, in_a_unit = as_ours(tensor), bool(getattr(tensor, "_fully_sharded", ""))
    if not in_a_unit and is_free_for(ours, mesh):
        return True
    layout, (resolved, order) = ours._spec.layout, _resolved(mesh, placements)
    same = ours.device_mesh == mesh and not in_a_unit  # a part of a unit is whole where it computes
    asked = layout.with_placements(resolved, order=order) if same else None
    if named_by and (asked is None or not layout.is_placed_as(asked)):
        raise ParallelError(
            f"{named_by}: the plan places {name}, which is placed already ({ours._spec.layout}); call "
            f"{named_by} before the strategy that placed it"
        )
    return False


def _check_patterns(patterns: ByPattern, named: Mapping[str, torch.Tensor]) -> None:
    for pattern in patterns:
        refuse_other_kind("a pattern", pattern, str, ParallelError, fix='names of parameters: "*.weight"')
        if not any(fnmatch.fnmatchcase(name, pattern) for name in named):
            raise ParallelError(f"no parameter or buffer is named {pattern!r}; {_names_near(pattern, named)}")


def _names_near(pattern: str, named: Mapping[str, torch.Tensor]) -> str:
    """What to write in its place: where it names modules, their own parameters."""
    split = [name.rpartition(".") for name in named]
    inside = dict.fromkeys(last for owner, _, last in split if owner and fnmatch.fnmatchcase(owner, pattern))
    if inside:
        return "it names a module; its own: " + ", ".join(f"'{pattern}.{last}'" for last in inside)
    return f"the module has {', '.join(list(named)[:6])}, ..."


def _distributed(
    name: str, tensor: torch.Tensor, mesh: DeviceMesh, placements: PlacementsArgument, source: int | None
) -> torch.Tensor:
    try:
        if isinstance(tensor, TorchDTensor):
            made = on_more_axes(as_ours(tensor), mesh, placements, KEPT, source)
        else:
            made = distribute_tensor(tensor.detach(), mesh, placements, src_data_rank=source)
    except ValueError as error:
        raise ParallelError(f"{name}: {error}") from error
    if not isinstance(tensor, nn.Parameter):
        return made
    parameter = nn.Parameter(made, requires_grad=tensor.requires_grad)
    return carry_over(tensor, parameter)


def carry_over(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Attributes that users hung on a parameter, and its hooks, move to the one that replaces it."""
    for key, value in vars(old).items():
        if not key.startswith("_"):
            setattr(new, key, value)
    hooks = getattr(old, "_backward_hooks", None)
    if hooks:
        for hook in hooks.values():
            new.register_hook(hook)
    for hook in (getattr(old, "_post_accumulate_grad_hooks", None) or {}).values():
        new.register_post_accumulate_grad_hook(hook)
    return new


def _set(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = tensor  # type: ignore[assignment]
    else:
        owner._buffers[leaf] = tensor


def _register_hooks(
    module: nn.Module,
    mesh: DeviceMesh,
    input_fn: Callable[..., Any] | None,
    output_fn: Callable[..., Any] | None,
) -> None:
    if input_fn is not None:
        taken = 2 if len(inspect.signature(input_fn).parameters) == 2 else 3
        module.register_forward_pre_hook(lambda owner, inputs: input_fn(*(owner, inputs, mesh)[-taken:]))
    if output_fn is not None:
        given = 2 if len(inspect.signature(output_fn).parameters) == 2 else 3
        module.register_forward_hook(lambda owner, _, outputs: output_fn(*(owner, outputs, mesh)[-given:]))

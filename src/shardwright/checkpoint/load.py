"""Load a checkpoint onto any mesh, entirely or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwright.checkpoint import files, storage
from shardwright.checkpoint.agree import gather, rank, together, world
from shardwright.checkpoint.manifest import Manifest, SavedTensor, read_manifest
from shardwright.checkpoint.model_state import ModelState, differences, local_of, read_model
from shardwright.checkpoint.optimizer_state import check_groups, make_room, write_optimizer
from shardwright.checkpoint.rng_state import write_rng
from shardwright.errors import CheckpointError

_SHOWN = 3


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint says beside its tensors. `rng_restored`: the generators go on where they were."""

    path: Path
    step: int | None
    extra: Any
    config: dict[str, Any]
    rng_restored: bool


@dataclass
class _Staged:
    """Everything that is loaded, before anything is changed."""

    model: dict[str, torch.Tensor]
    optimizer: dict[tuple[str, str], torch.Tensor]
    values: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    objects: dict[str, Any]
    rng: dict[str, Any] | None
    extra: Any


def load(path: Path | str, model: nn.Module, optimizer: Optimizer | None = None) -> Loaded:
    """Load a checkpoint into a model, and an optimizer, whose layouts may differ from those that were saved.

    A collective over the world. Every byte is checked, then everything is read into new tensors, and only
    when all ranks have all of it the model and the optimizer are changed. The generators are restored where
    the world has the size that it had.

    Args:
        path: a finished checkpoint.
        model: the same parameters and buffers by name, shape and dtype; any placements.
        optimizer: of the same class; it may be fresh. None: its state stays in the checkpoint.

    Raises: CheckpointError: on every rank, with nothing changed: the checkpoint is unfinished or damaged,
    or is of another model or optimizer.
    Cost: no tensor data is communicated; each rank reads what it holds, and needs memory for it twice.
    """
    path = Path(path)
    with together(f"reading {path}"):
        manifest = read_manifest(path)
        files.check_sizes(path, manifest)
        files.check_content(path, manifest, sorted(manifest.files)[rank() :: world()])
    with together("comparing the model"):
        state = read_model(model)
        mine = state.identity
    _check_model(path, manifest, state, mine)
    with together("comparing the optimizer"):
        staged = _make_room(path, manifest, state, optimizer)
    _fetch(path, manifest, state, staged, optimizer)
    _change(state, staged, optimizer)
    return Loaded(path, manifest.step, staged.extra, manifest.config, staged.rng is not None)


def _check_model(path: Path, manifest: Manifest, state: ModelState, mine: dict[str, SavedTensor]) -> None:
    here: dict[str, SavedTensor] = {}
    aliases: dict[str, str] = {}
    objects: set[str] = set()
    for tensors, tied, with_objects in gather((mine, state.aliases, tuple(state.objects))):
        here |= tensors
        aliases |= tied
        objects |= set(with_objects)
    found = differences(manifest, here, aliases)
    found += [f"{name} has extra state on one side only" for name in objects ^ set(manifest.objects)]
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise CheckpointError(
            f"{path} is a checkpoint of another model: {'; '.join(found[:_SHOWN])}{more}. "
            "Build the model with the settings of the checkpoint (manifest.json has them), or start a new run"
        )


def _make_room(path: Path, manifest: Manifest, state: ModelState, optimizer: Optimizer | None) -> _Staged:
    if optimizer is not None and manifest.optimizer is None:
        raise CheckpointError(f"{path} holds no optimizer state: load it without an optimizer")
    tuned = manifest.optimizer
    room = make_room(optimizer, state.names(), tuned) if optimizer is not None and tuned is not None else {}
    tensors = {name: torch.zeros_like(one.detach()) for name, one in state.tensors.items()}
    return _Staged(tensors, room, {}, [], {}, None, None)


def _fetch(
    path: Path, manifest: Manifest, state: ModelState, staged: _Staged, optimizer: Optimizer | None
) -> None:
    """Read everything into `staged`."""
    wanted: dict[str, Any] = {f"model/{manifest.aliases.get(n, n)}": one for n, one in staged.model.items()}
    wanted |= {f"optimizer/{parameter}/{name}": one for (parameter, name), one in staged.optimizer.items()}
    wanted |= {f"object/{name}": None for name in state.objects}
    wanted["extra"] = None
    settings = [f"settings/{one}" for one in manifest.settings] if optimizer is not None else []
    wanted |= dict.fromkeys(settings)
    same_world = manifest.world == world()
    if same_world:
        wanted[f"rng/{rank()}"] = None
    storage.read(path, wanted)
    staged.extra = wanted["extra"]
    staged.rng = wanted[f"rng/{rank()}"] if same_world else None
    staged.objects = {name: wanted[f"object/{name}"] for name in state.objects}
    with together("comparing the optimizer's groups"):
        _take_settings(staged, [wanted[one] for one in settings], state, optimizer)


def _take_settings(
    staged: _Staged, settings: list[dict[str, Any]], state: ModelState, optimizer: Optimizer | None
) -> None:
    if optimizer is None:
        return
    for one in settings:
        staged.values |= one["values"]
    staged.groups = check_groups(optimizer, state.names(), _merge([one["groups"] for one in settings]))


def _merge(per_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One list of groups from those of ranks that hold different parameters (pipeline stages)."""
    merged = [dict(group) for group in per_rank[0]]
    for groups in per_rank[1:]:
        for mine, other in zip(merged, groups, strict=True):
            mine["params"] = list(dict.fromkeys((*mine["params"], *other["params"])))
    return merged


def _change(state: ModelState, staged: _Staged, optimizer: Optimizer | None) -> None:
    """Put what was staged into place. Nothing here can fail for a reason that the checks did not exclude."""
    with torch.no_grad():
        for name, tensor in state.tensors.items():
            local_of(tensor).copy_(local_of(staged.model[name]))
    for name, module in state.objects.items():
        module.set_extra_state(staged.objects[name])
    if optimizer is not None:
        write_optimizer(optimizer, state.names(), staged.optimizer, staged.values, staged.groups)
    if staged.rng is not None:
        write_rng(staged.rng)

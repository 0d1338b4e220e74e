"""Save a run so that a crash at any moment leaves a complete checkpoint or none."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from shardwright.checkpoint import files, storage
from shardwright.checkpoint.agree import gather, rank, together, world
from shardwright.checkpoint.library import library_version
from shardwright.checkpoint.manifest import Manifest, SavedFile, SavedOptimizer, SavedTensor
from shardwright.checkpoint.model_state import ModelState, read_model
from shardwright.checkpoint.optimizer_state import OptimizerState, read_optimizer
from shardwright.checkpoint.rng_state import read_rng

V = TypeVar("V")


@dataclass(frozen=True)
class _Part:
    """What one rank contributes to the manifest."""

    model: dict[str, SavedTensor]
    aliases: dict[str, str]
    objects: tuple[str, ...]
    optimizer: SavedOptimizer | None
    settings: str | None
    files: dict[str, SavedFile] = field(default_factory=dict)


def save(
    path: Path | str,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    step: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint that any mesh can load: each rank writes its pieces, copies are written once.

    A collective over the world: every rank calls it, on a file system that all of them see. The files go to
    `<path>.partial`; when all are on the disk, rank 0 writes the manifest and renames the folder to `path`.
    That rename is the commit point.

    Args:
        path: the checkpoint's folder. An older checkpoint there is replaced once the new one is complete;
            anything else there is an error.
        model: its parameters and persistent buffers are saved, tied ones once; a plain tensor is taken to
        be the
            same on every rank.
        optimizer: its state is saved by parameter name.
        extra: any picklable value, rank 0's; `load` returns it.
        step: how many steps were done; `load` returns it.
        config: settings to keep readable in the manifest (plain JSON values).

    Returns: `path`.
    Raises: CheckpointError: on every rank, where one rank failed; nothing was committed.
    Cost: no tensor data is communicated; a few gathers of plans and file names, one write and one read (for
    the checksum) of each byte.
    """
    path = Path(path)
    with together("preparing the checkpoint"):
        state = read_model(model)
        tuned = read_optimizer(optimizer, state.names()) if optimizer is not None else None
        part = _describe(state, tuned)
        if rank() == 0:
            files.start_partial(path)
    partial = files.partial_of(path)
    storage.write(partial, _entries(state, tuned, extra))
    with together("checking the written files"):
        mine = {one.name: files.describe_file(one) for one in storage.my_files(partial)}
    parts = gather(replace(part, files=mine))
    with together("committing the checkpoint"):
        if rank() == 0:
            files.commit(path, _manifest(parts, step, config))
    return path


def _describe(state: ModelState, tuned: OptimizerState | None) -> _Part:
    return _Part(
        state.identity,
        state.aliases,
        tuple(state.objects),
        tuned.identity if tuned is not None else None,
        tuned.key if tuned is not None else None,
    )


def _entries(state: ModelState, tuned: OptimizerState | None, extra: Any) -> dict[str, Any]:
    """What this rank gives to the storage, by key."""
    entries: dict[str, Any] = {f"model/{name}": tensor for name, tensor in state.tensors.items()}
    entries.update({f"object/{name}": module.get_extra_state() for name, module in state.objects.items()})
    entries[f"rng/{rank()}"] = read_rng()
    if tuned is not None:
        entries.update(
            {f"optimizer/{parameter}/{name}": one for (parameter, name), one in tuned.tensors.items()}
        )
        entries[f"settings/{tuned.key}"] = {"values": tuned.values, "groups": tuned.groups}
    if rank() == 0:
        entries["extra"] = extra
    return entries


def _manifest(parts: list[_Part], step: int | None, config: Mapping[str, Any] | None) -> Manifest:
    """What all ranks wrote. Where several describe one tensor, the lowest rank's words are kept."""
    tuned = [one.optimizer for one in parts if one.optimizer is not None]
    return Manifest(
        library=library_version(),
        torch=torch.__version__,
        world=world(),
        step=step,
        config=dict(config or {}),
        model=_union(one.model for one in parts),
        aliases=_union(one.aliases for one in parts),
        objects=tuple(sorted({name for one in parts for name in one.objects})),
        optimizer=SavedOptimizer(kind=tuned[0].kind, state=_union(one.state for one in tuned))
        if tuned
        else None,
        settings=tuple(sorted({one.settings for one in parts if one.settings is not None})),
        files=_union(one.files for one in parts),
    )


def _union(dicts: Iterable[dict[str, V]]) -> dict[str, V]:
    return dict(ChainMap(*dicts))

"""What of a state is not as in a checkpoint, over all ranks: one phrase for each name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from shardwright.checkpoint.storage.manifest import Manifest
from shardwright.errors import CheckpointError

_SHOWN = 3
Wanted = Callable[[str], bool]


class Identity(NamedTuple):
    """What a rank has: tensors by name, ties, the modules and the values that it wants.

    Args: roots: paths of modules: the checkpoint has nothing below them that is not here.
    """

    tensors: dict[str, tuple[str, tuple[int, ...]]]
    ties: dict[str, str]
    roots: tuple[str, ...]
    values: tuple[str, ...]


def refuse_differences(path: Path, manifest: Manifest, ranks: Iterable[Identity], wanted: Wanted) -> None:
    """Raises CheckpointError, the same on every rank, where the state here is another one."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    ties: dict[str, str] = {}
    roots: set[str] = set()
    values: set[str] = set()
    for one in ranks:
        tensors |= one.tensors
        ties |= one.ties
        roots |= set(one.roots)
        values |= set(one.values)
    found = _tensors(manifest, tensors, ties, roots, wanted) + _values(manifest, values, roots, wanted)
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise CheckpointError(
            f"{path} is a checkpoint of another model: {'; '.join(found[:_SHOWN])}{more}. Build the "
            "model with the "
            "settings of the checkpoint (manifest.json has them), load a part of it (only=), or start a "
            "new run"
        )


def _tensors(
    manifest: Manifest,
    here: dict[str, tuple[str, tuple[int, ...]]],
    ties: dict[str, str],
    roots: set[str],
    wanted: Wanted,
) -> list[str]:
    saved = manifest.tensors
    below = tuple(f"{root}/" for root in roots)
    names = [name for name in (*saved, *manifest.ties) if name.startswith(below) and wanted(name)]
    found = [f"{name} is not in the model" for name in names if name not in here and name not in ties]
    for name, (dtype, shape) in here.items():
        theirs = saved.get(manifest.ties.get(name, name))
        if theirs is None:
            found.append(f"{name} is not in the checkpoint")
        elif (theirs.shape, theirs.dtype) != (shape, dtype):
            found.append(f"{name} is {theirs} in the checkpoint but {dtype}{list(shape)} in the model")
    ours = {name: first for name, first in manifest.ties.items() if name in here or name in ties}
    return (
        found
        + _untied(ours, ties, "in the checkpoint", "in the model")
        + _untied(ties, manifest.ties, "in the model", "in the checkpoint")
    )


def _untied(one: dict[str, str], other: dict[str, str], where: str, but_not: str) -> list[str]:
    """Ties of `one` that `other` does not have (which of the tied names comes first does not matter)."""
    return [
        f"{name} is tied to {first} {where} but not {but_not}"
        for name, first in one.items()
        if other.get(name, name) != other.get(first, first)
    ]


def _values(manifest: Manifest, here: set[str], roots: set[str], wanted: Wanted) -> list[str]:
    below = tuple(f"{root}/" for root in roots)
    extra = {name for name in manifest.values if name.startswith(below) and wanted(name)}
    return [f"{name} is in the checkpoint only" for name in sorted(extra - here)] + [
        f"{name} is not in the checkpoint" for name in sorted(here - set(manifest.values))
    ]

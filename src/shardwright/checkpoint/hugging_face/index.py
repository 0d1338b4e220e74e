"""Which file of a Hugging Face folder each tensor is in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwright.checkpoint.storage import disk
from shardwright.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MOST = 1 << 28


def read_index(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """The files, each a plain name, and tensor -> its file; None: there is one file, which has all.

    Raises: CheckpointError: there is no such folder, it holds both forms, or the index names something else
    than files of the folder.
    """
    single, index = (folder / SINGLE).exists(), (folder / INDEX).exists()
    if single and index:
        raise CheckpointError(
            f"{folder} holds {SINGLE} and {INDEX}, so which of them is the model is not known: remove "
            "the old one"
        )
    if not index:
        if not single:
            why = (
                f"holds neither {SINGLE} nor {INDEX}"
                if folder.is_dir()
                else "is no folder (nothing is fetched)"
            )
            raise CheckpointError(f"{folder} {why}: name a folder with one of them")
        return [SINGLE], None
    try:
        text = disk.read_small(folder / INDEX, _MOST, links=True)
        of_tensor = dict(json.loads(text, object_pairs_hook=_once)["weight_map"])
        for name in of_tensor.values():
            _refuse_other_places(folder, name)
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder / INDEX} cannot be read: {error}") from None
    return sorted(set(of_tensor.values())), of_tensor


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1)
        raise ValueError(f"it names {twice!r} twice")
    return found


def _refuse_other_places(folder: Path, name: Any) -> None:
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
        raise CheckpointError(f"{folder / INDEX} names a file {name!r}, which is no file of this folder")

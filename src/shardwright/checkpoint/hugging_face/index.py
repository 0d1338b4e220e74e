"""Which file of a Hugging Face folder each tensor is in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwright.checkpoint.storage import disk
from shardwright.checkpoint.storage.safetensors_file import once
from shardwright.errors import CheckpointError, reason_of

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MOST = 1 << 28
_OTHERS = {  # what is in a folder that another function reads, or another name
    "manifest.json": "it is a checkpoint of this library, which `load` reads",
    ".metadata": "it is torch's distributed checkpoint, which `convert` reads",
    "*.safetensors": "give the file {!r}, if that is the model, the first name",
    "*.bin": "`convert` writes the pickle {!r} anew, then `load` reads that",
    "*.pt*": "`convert` writes the pickle {!r} anew, then `load` reads that",
}


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
            raise CheckpointError(f"{folder} {_without_either(folder)}")
        return [SINGLE], None
    try:
        text = disk.read_small(folder / INDEX, _MOST, links=True)
        of_tensor = dict(json.loads(text, object_pairs_hook=once)["weight_map"])
        for name in of_tensor.values():
            _refuse_other_places(folder, name)
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder / INDEX} cannot be read: {reason_of(error)}") from None
    return sorted(set(of_tensor.values())), of_tensor


def _without_either(folder: Path) -> str:
    if not folder.is_dir():
        return "is no folder (nothing is fetched): name a folder with safetensors files"
    tries = ((next(folder.glob(pattern), None), said) for pattern, said in _OTHERS.items())
    known = (said.format(found.name) for found, said in tries if found is not None)
    return f"holds neither {SINGLE} nor {INDEX}: {next(known, 'name a folder with one of them')}"


def _refuse_other_places(folder: Path, name: Any) -> None:
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
        raise CheckpointError(f"{folder / INDEX} names a file {name!r}, which is no file of this folder")

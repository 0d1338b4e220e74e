"""What torch's own formats hold: things by the path of names that leads to them. Nothing is executed."""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwright.checkpoint.optimizer_state import OWN
from shardwright.checkpoint.pieces import refuse_without_data
from shardwright.checkpoint.storage import dcp, disk
from shardwright.checkpoint.storage.element_types import name_of
from shardwright.errors import CheckpointError, reason_of

Steps = tuple[Any, ...]  # names, and numbers for places in a list
Shape = tuple[int, ...]

_UNFINISHED = f"is no checkpoint of torch's: it has no {dcp.INDEX}, which a save writes last"
_OTHERS = {  # what is in a folder that another function reads
    "manifest.json": "is a checkpoint of this library: `load` reads it; `save(format='dcp')` writes torch's",
    "checkpoints": "is the folder of a run: name one of its checkpoints",
    "*.safetensors": "has files in the format of Hugging Face: `load_hf` reads them",
}


class ForeignTensor(NamedTuple):
    """A tensor of the source: boxes (offset, size, what reads it), read when they are written."""

    dtype: str
    shape: Shape
    boxes: Sequence[tuple[Shape, Shape, Callable[[], torch.Tensor]]]

    def whole(self) -> torch.Tensor:
        """All of it, in memory."""
        found = torch.empty(self.shape, dtype=getattr(torch, self.dtype), device="cpu")
        for offset, size, read in self.boxes:
            found[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))] = read()
        return found


def read(source: Path) -> Iterator[tuple[Steps, Any]]:
    """What a folder or a file of torch's holds. Raises: CheckpointError: it may not be looked at."""
    try:
        folder, _ = source.is_dir(), (source / dcp.INDEX).exists()
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {reason_of(error)}") from None
    return read_folder(source) if folder else read_file(source)


def read_folder(source: Path) -> Iterator[tuple[Steps, Any]]:
    """What a folder of torch's distributed checkpoint holds: tensors and values."""
    if not (source / dcp.INDEX).exists():
        found = (said for pattern, said in _OTHERS.items() if any(source.glob(pattern)))
        raise CheckpointError(f"{source} {next(found, _UNFINISHED)}")
    folder = dcp.read_index(source)
    for name, (dtype, shape, pieces) in folder.tensors.items():
        boxes = [(one.offset, one.size, partial(dcp.read_piece, folder, name, one)) for one in pieces]
        yield folder.steps.get(name, (name,)), ForeignTensor(dtype, shape, boxes)
    for name, place in folder.objects.items():
        yield folder.steps.get(name, (name,)), dcp.read_object(folder, name, place)


def read_file(source: Path) -> Iterator[tuple[Steps, Any]]:
    """What a file of `torch.save` holds.

    Raises: CheckpointError: it is no dict of tensors, or could only be read by executing it.
    """
    try:
        os.close(disk.open_regular(source, links=True))
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {reason_of(error)}") from None
    try:
        mapped = zipfile.is_zipfile(source)  # torch's first format is none
        with warnings.catch_warnings():
            # Torch 2.14 says that it looks at each element of a sparse tensor, which is refused below.
            warnings.filterwarnings("ignore", "Validating sparse tensor")
            found = torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # noqa: BLE001  a pickle that somebody made to harm may raise anything
        raise CheckpointError(
            f"{source} is no file of torch.save, or cannot be read without executing it (of modules and "
            f"optimizers, save the state_dict()): {dcp.reason_of(error)}"
        ) from None
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{source} holds a {type(found).__name__}, not a dict of tensors")
    yield from _flat((), found)


def _flat(steps: Steps, found: Mapping[Any, Any]) -> Iterator[tuple[Steps, Any]]:
    if _is_optimizer(found):
        yield from _of_optimizer(steps, found)
        return
    for name, one in found.items():
        yield from _below((*steps, str(name)), one)


def _below(here: Steps, one: Any) -> Iterator[tuple[Steps, Any]]:
    """A thing, or those of a dict by name and of a list with optimizers in it by number."""
    if isinstance(one, Mapping) and one and (_is_optimizer(one) or all(type(key) is str for key in one)):
        yield from _flat(here, one)
    elif isinstance(one, list | tuple) and any(map(_is_optimizer, one)):
        for number, each in enumerate(one):
            yield from _below((*here, number), each)
    else:
        yield here, as_thing(one, here)


def _is_optimizer(found: Any) -> bool:
    if not isinstance(found, Mapping):
        return False
    return isinstance(found.get("state"), Mapping) and isinstance(found.get("param_groups"), list)


def _of_optimizer(steps: Steps, found: Mapping[Any, Any]) -> Iterator[tuple[Steps, Any]]:
    own = {name: one for name, one in found["state"].items() if not isinstance(one, Mapping)}
    for parameter, state in (*found["state"].items(), (OWN, own)):
        for name, one in {} if parameter in own else state.items():
            here = (*steps, "state", str(parameter), str(name))
            yield here, as_thing(one, here)
    for number, group in enumerate(found["param_groups"]):
        for name, one in group.items():
            yield (*steps, "param_groups", number, str(name)), as_thing(one)


def whole(thing: Any) -> Any:
    """A thing, of a tensor all of it."""
    return thing.whole() if isinstance(thing, ForeignTensor) else thing


def as_thing(one: Any, steps: Steps = ()) -> Any:
    """A tensor as one of the source; anything else as it is. Raises: CheckpointError: no file holds it."""
    if not isinstance(one, torch.Tensor):
        return one
    refuse_without_data(one, ".".join(map(str, steps)))
    shape = tuple(one.shape)
    whole = ((0,) * len(shape), shape, partial(torch.Tensor.detach, one))
    return ForeignTensor(name_of(one.dtype), shape, [whole] if one.numel() else [])

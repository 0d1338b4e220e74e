"""Checkpoints of others, written anew as ones of this library: torch's, and those of its first format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwright.checkpoint.others import first_format
from shardwright.checkpoint.others.converted import Converted, Key
from shardwright.checkpoint.others.foreign import Steps, read
from shardwright.checkpoint.others.foreign_optimizers import Numbered, called, take_optimizers
from shardwright.checkpoint.storage.commit import Saving
from shardwright.checkpoint.storage.folder_names import metadata
from shardwright.checkpoint.storage.manifest import LIMIT, VERSION, Manifest, dump, library_version
from shardwright.checkpoint.storage.place import Place, folder_of, place_of
from shardwright.checkpoint.storage.proof import prove
from shardwright.checkpoint.storage.stores.of import store_of
from shardwright.checkpoint.storage.sums import CHUNK
from shardwright.checkpoint.storage.writer import Entry, into_files, write_file
from shardwright.errors import CheckpointError, reason_of, refuse_other_kind


def convert(
    source: Path | str, target: Place | str, *, key: Key | None = None, parameters: Numbered = None
) -> Place:
    """Write what another program saved as a checkpoint that `load` reads onto any mesh.

    Args:
        source: a folder of torch's distributed checkpoint (`fully_shard` and `get_state_dict` included), a
            file of `torch.save` with dicts of tensors and what `state_dict()` gives of optimizers, or a
            checkpoint of the first format of this library (with its optimizer; generators start anew).
        target: the new checkpoint's folder.
        key: from a name there (levels joined by dots) to a key here. None: what is called `model`,
            `model_state_dict` or `state_dict` there is `model` here and all else keeps its name; where
            nothing is called so, all is the model. A single optimizer is called `optimizer`, and `rng` is
            `rng~`, for a checkpoint has one of its own.
        parameters: the names of the parameters in the order in which the optimizer had them, for one that
            knows them by number and not by name (`optimizer.state_dict()`). Of several optimizers a mapping,
            by the name of each there: such names, or that of the module whose parameters it has.
    Returns: `target`.
    Raises: CheckpointError: the source is damaged, holds what could only be executed, two names get one key,
    or it is not known which parameter a state belongs to.
    Cost: one process reads and writes it, one box in memory at a time. Nothing of the source is executed.
    """
    source, target = folder_of(source), place_of(target)
    none = type(None)
    refuse_other_kind("key", key, (Callable, none), CheckpointError, fix="a function of a name there")
    kinds = (Sequence, Mapping, none)
    refuse_other_kind("parameters", parameters, kinds, CheckpointError, fix="names, in the optimizer's order")
    old = first_format.read(source)
    found: dict[Steps, Any] = {}
    for steps, one in read(source):
        if found.setdefault(steps, one) is not one:
            raise CheckpointError(f"{source}: two things are called {called(steps)}, one of them by a number")
    new = Converted(source, found, key if key is not None else (None if old is None else first_format.key))
    optimizers = [] if old is not None else take_optimizers(found, parameters)
    if parameters is not None and not optimizers:
        raise CheckpointError(
            f"{source} holds no optimizer that knows its parameters by number, and parameters= names some: "
            "leave it out"
        )
    by_name = parameters if isinstance(parameters, Mapping) else {}
    for one in optimizers:
        said = by_name.get(called(one.steps))
        path = "optimizer" if len(optimizers) == 1 else "/".join(map(str, one.steps))
        new.add_optimizer(one, path, said if isinstance(said, str) else None)
    for path, name, thing in new.named(found):
        new.add(path, name, thing)
    about: dict[str, Any] = {"world": 1, "step": None, "config": {}, "ties": {}}
    about |= {"modules": ["model"], "optimizers": new.optimizers}
    step = new.values.get("step")
    if type(step) is int and 0 <= step < LIMIT:
        about["step"] = step
    if old is not None:
        about |= first_format.describe(old, new.tensors, new.values)
    try:
        return _write(target, {**about, "tensors": new.tensors, "values": new.values}, new.entries)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {reason_of(error)}") from None


def _write(target: Place, about: dict[str, Any], entries: list[Entry]) -> Place:
    saving, store = Saving(target), store_of(target)
    saving.begin()
    try:
        written = [
            write_file(store, f"data-{saving.id}-00000-{number:03d}.safetensors", one, metadata(saving.id))
            for number, one in enumerate(into_files(entries))
        ]
        for number, file in enumerate(written):
            for path, (offset, size), at, sums in file.boxes:
                part = {"file": number, "at": at, "offset": offset, "size": size, "sums": sums}
                about["tensors"][path]["parts"].append(part)
        files = [{"name": f.name, "size": f.size, "header": f.header, "sum": f.sum} for f in written]
        body = {"format": "shardwright", "version": VERSION, "id": saving.id, "library": library_version()}
        text = dump({**body, "torch": torch.__version__, "chunk": CHUNK, "files": files, **about})
        prove(Manifest.parse(text))
        saving.commit(text, written)
    except BaseException:
        saving.abandon()
        raise
    return target

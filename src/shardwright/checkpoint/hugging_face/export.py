"""Write a placed model as a folder that `from_pretrained` reads: whole tensors in files of a bounded size."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.checkpoint.agree import Call, answered, rank, warn_without_group, world
from shardwright.checkpoint.collect import digest
from shardwright.checkpoint.hugging_face.conversions import Maps, maps_of
from shardwright.checkpoint.hugging_face.index import SINGLE
from shardwright.checkpoint.hugging_face.maps import Link, Map, cut_by, in_steps, links_of
from shardwright.checkpoint.hugging_face.under_way import UnderWay, before_named, is_seen, metadata
from shardwright.checkpoint.model_state import read_model
from shardwright.checkpoint.pieces import describe, is_copied
from shardwright.checkpoint.storage import disk
from shardwright.checkpoint.storage.element_types import DTYPES, STANDARD
from shardwright.checkpoint.storage.place import folder_of
from shardwright.checkpoint.storage.proof import why_not_once
from shardwright.checkpoint.storage.values import refuse_half_a_character
from shardwright.checkpoint.storage.writer import Entry, blocks, header_of
from shardwright.errors import CheckpointError, reason_of, words_of

_OWN = "__metadata__"  # where they have that


class _Out(NamedTuple):
    """A tensor of a file, or a box of one: the part of a model's tensor that it is.

    Args: nbytes: of the whole tensor of the file.
    """

    name: str
    link: Link
    dtype: str
    nbytes: int


def save_hf(model: nn.Module, folder: Path | str, *, maps: Maps = (), max_shard_size: int = 5 << 30) -> Path:
    """Write a model's tensors as safetensors files with an index, as `save_pretrained` does.

    A collective over the world. Tied tensors are written once, by their first name (of models of
    `transformers` by that which `save_pretrained` keeps). The configuration is not written:
    `model.config.save_pretrained(folder)` does, after `model.config.dtype = model.dtype` (as which
    `from_pretrained` reads the files, whatever their types are).

    Args:
        folder: it may hold other files, but no safetensors files yet; what an interrupted export left goes.
        maps: those that `load_hf` took, `"auto"` too: read backwards here.
        max_shard_size: bytes of a file at most, unless one tensor is larger.

    Returns: `folder`.
    Raises: CheckpointError: on every rank, with no file left: a tensor is still to be summed, or is plain and
    differs between ranks, so does an argument, there are such files already, or the disk refuses.
    Cost: each tensor is gathered on all ranks that have a part of it (those of its stage, in a pipeline), one
    at a time, and written by one of them; memory for one.
    """
    warn_without_group(folder)
    with Call() as call:
        return _exported(call, model, folder, maps, max_shard_size)


def _exported(call: Call, model: nn.Module, folder: Path | str, maps: Maps, most: int) -> Path:
    made: list[_Export] = []

    def first() -> _Plan:
        made.append(_Export(model, folder_of(folder), maps_of(model, maps), most))
        return made[0].plan()

    try:
        plans = call.agreed(f"exporting {folder} for Hugging Face", first)
        export = made[0]
        export.arrange(plans)
        export.stream(call)
        call.agreed(f"exporting {export.folder} for Hugging Face", export.finish)
        call.agreed(f"exporting {export.folder} for Hugging Face", export.name_all, whole=True)
    finally:  # Ctrl-C too: what is half written would stand in the way of the next export
        for export in made:
            export.close()
    return made[0].folder


class _Tensor(NamedTuple):
    """A tensor of a rank's model, and what of it is written."""

    name: str
    outs: tuple[_Out, ...]


class _Plan(NamedTuple):
    """What one rank has to export, in its order; what was asked for.

    copies: (name, boxes) -> a digest, of what other ranks may hold too.
    """

    key: str
    asked: tuple[tuple[str, str], ...]
    tensors: tuple[_Tensor, ...]
    copies: dict[tuple[str, Any], str]


class _Export:
    def __init__(self, model: nn.Module, folder: Path, maps: tuple[Map, ...], most: int) -> None:
        self.model, self.folder, self.maps, self.most = model, folder, maps, most
        self.key = secrets.token_hex(8)
        self.under_way: UnderWay | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self.order: list[str] = []
        self.files: list[list[_Out]] = []
        self.writers: list[int] = []
        self.of_tensor: dict[str, list[tuple[int, _Out]]] = {}
        self.handles: dict[int, int] = {}
        self.joined: dict[str, tuple[torch.Tensor, list[_Out]]] = {}  # of which parts are still to come
        self.failure: BaseException | None = None  # of this rank, which the others hear of at the end

    def plan(self) -> _Plan:
        """What this rank has."""
        if type(self.most) is not int or self.most < 1:
            raise CheckpointError(f"max_shard_size={self.most!r} is no number of bytes: 5 << 30 is 5 GiB")
        told: list[_Tensor] = []
        copies: dict[tuple[str, Any], str] = {}
        self.tensors = _once(self.model)
        for name, tensor in self.tensors.items():
            held = describe(tensor, name, rank())
            told.append(self._told(name, tensor, held.dtype))
            if held.boxes and world() > 1 and (held.layout is None or is_copied(tensor)):
                copies[name, held.boxes] = digest(tensor)
        asked = ("folder", str(self.folder.absolute())), ("max_shard_size", str(self.most))
        if rank() == 0:
            self.under_way = UnderWay(self.folder, self.key)
            self.under_way.begin()
        return _Plan(self.key, asked, tuple(told), copies)

    def _told(self, name: str, tensor: torch.Tensor, dtype: str) -> _Tensor:
        if dtype not in STANDARD:
            raise CheckpointError(f"{name} is {dtype}, which these files have no name for: cast it first")
        outs = [
            _Out(link.source, link, dtype, torch.Size(link.whole).numel() * tensor.element_size())
            for link in links_of(name, tuple(tensor.shape), self.maps)
        ]
        for out in outs:
            refuse_half_a_character(out.name, f"the name in the files of {name}")
        if any(out.name == _OWN for out in outs):
            raise CheckpointError(
                f"{name} would be called {_OWN!r}, which these files keep for themselves: rename it"
            )
        return _Tensor(name, tuple(outs))

    def arrange(self, plans: Sequence[_Plan]) -> None:
        """Decide which tensor is in which file, and which of the ranks that have all of a file's writes it.

        Stages of a pipeline have other tensors each. Those of wide elements come first, so that each begins
        where a program that maps the file can read it in place.

        Raises: CheckpointError: the same on every rank: the ranks, or two tensors, contradict each other.
        """
        self.key = plans[0].key
        known: dict[str, _Tensor] = {}
        holders: dict[str, tuple[int, ...]] = {}
        copies: dict[tuple[str, Any], str] = {}
        for number, plan in enumerate(plans):
            for asked, of_first in zip(plan.asked, plans[0].asked, strict=True):
                _refuse_two(asked[0], asked, of_first)
            for one in plan.tensors:
                first = known.setdefault(one.name, one)
                named_alike = [out.name for out in one.outs] == [out.name for out in first.outs]
                _refuse_two(one.name if named_alike else "maps", one, first)
                holders[one.name] = (*holders.get(one.name, ()), number)
            for which, digested in plan.copies.items():
                _refuse_two(which[0], digested, copies.setdefault(which, digested))
        if not known:
            raise CheckpointError("the model has no tensors, so there is nothing to write")
        _refuse_one_name(known, holders)
        self.order = sorted(known, key=lambda name: -DTYPES[known[name].outs[0].dtype].itemsize)
        room = 0
        of_file: tuple[int, ...] = ()
        waiting: dict[str, list[tuple[str, _Out]]] = {}
        for name, out in ((one, out) for one in self.order for out in known[one].outs):
            made = waiting.setdefault(out.name, [])
            made.append((name, out))
            if not _is_all([one for _, one in made]):
                continue
            if not self.files or holders[name] != of_file or (out.nbytes > room and self.files[-1]):
                self.files.append([])
                room, of_file = self.most, holders[name]
                self.writers.append(of_file[len(self.files) % len(of_file)])
            room -= out.nbytes
            self.files[-1].append(out)
            for part_of, part in made:
                self.of_tensor.setdefault(part_of, []).append((len(self.files) - 1, part))

    def _named(self, number: int) -> str:
        count = len(self.files)
        return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"

    def _before_named(self, number: int) -> Path:
        return self.folder / before_named(self._named(number), self.key)

    def stream(self, call: Call) -> None:
        """Gather one tensor after another, and write those of this rank's files.

        What fails here (the disk refuses, Ctrl-C) is told at the end: the other ranks gather until then.
        """
        for name in self.order:
            tensor = self.tensors.get(name)
            if tensor is None:  # of another stage
                continue
            with torch.no_grad(), answered(f"exporting {self.folder}"):
                whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
            if self.failure is None:
                self._try_to_write(call, name, whole)

    def _try_to_write(self, call: Call, name: str, whole: torch.Tensor) -> None:
        try:
            with call.interrupts.open():
                for number, out in self.of_tensor[name]:
                    if self.writers[number] == rank():
                        self._write(number, out, whole)
        except BaseException as error:  # noqa: BLE001  the other ranks go on to collectives
            self.failure = error

    def _write(self, number: int, out: _Out, whole: torch.Tensor) -> None:
        link = out.link
        part = whole[tuple(slice(o, o + s) for o, s in zip(link.offset, link.size, strict=True))]
        gone = [dim for dim in range(part.dim()) if dim not in link.dims]
        part = part.permute([*link.dims, *gone]).reshape(link.shape)
        if link.within is not None:
            joined, parts = self.joined.setdefault(out.name, (_room_for(out), []))
            sides = zip(link.start, link.shape, link.steps, strict=True)
            joined[tuple(slice(o, o + s * step, step) for o, s, step in sides)] = part
            parts.append(out)
            if not _is_all(parts):
                return
            part = self.joined.pop(out.name)[0]
        self._begin(number)
        for block in blocks(part):
            disk.write_all(self.handles[number], [block])

    def _begin(self, number: int) -> None:
        if number not in self.handles:
            if not is_seen(self.folder, self.key):
                raise CheckpointError(
                    f"rank {rank()} does not see what rank 0 made in {self.folder}: it was removed or "
                    "emptied while it was written, or the ranks do not share this file system"
                )
            self.handles[number] = -1  # so that the file goes, whatever happens from here on
            self.handles[number] = disk.open_new(self._before_named(number))
            entries = [self._entry(one) for one in self.files[number]]
            disk.write_all(self.handles[number], [memoryview(header_of(entries, metadata(self.key)))])

    def _entry(self, out: _Out) -> Entry:
        shape = out.link.whole
        return Entry(out.name, out.dtype, ((0,) * len(shape), shape), True, torch.empty(0, device="cpu"))

    def finish(self) -> None:
        """Wait until this rank's files are on the disk."""
        if self.failure is not None:
            if isinstance(self.failure, CheckpointError) or not isinstance(self.failure, Exception):
                raise self.failure
            raise CheckpointError(f"{self.folder} cannot be written: {words_of(self.failure)}")
        for handle in self.handles.values():
            os.fsync(handle)
        self._close()

    def name_all(self) -> None:
        """Give the files their names, the index last."""
        if self.under_way is None:
            return
        weights = {out.name: self._named(n) for n, outs in enumerate(self.files) for out in outs}
        total = sum(out.nbytes for outs in self.files for out in outs)
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        text = json.dumps(index, indent=1).encode() if len(self.files) > 1 else b""
        try:
            self.under_way.commit([self._named(number) for number in range(len(self.files))], text)
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be written: {reason_of(error)}") from None

    def close(self) -> None:
        """Let the folder go. What of this rank was not given a name, and where it commits of all, goes."""
        numbers = list(self.handles)
        self._close()
        try:
            for number in numbers:
                with contextlib.suppress(OSError):
                    self._before_named(number).unlink()
        finally:  # Ctrl-C too
            if self.under_way is not None:
                self.under_way.close()

    def _close(self) -> None:
        for handle in self.handles.values():
            with contextlib.suppress(OSError):
                os.close(handle)
        self.handles = dict.fromkeys(self.handles, -1)


def _once(model: nn.Module) -> dict[str, torch.Tensor]:
    """Each tensor of a model by one name: by the one that a model of `transformers` keeps of tied ones.

    That is not always the first, and the model without its head knows no other.
    """
    names: dict[int, list[str]] = {}
    tensors = read_model(model).tensors
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    given_up = getattr(model, "all_tied_weights_keys", {})
    kept = (next((name for name in each if name not in given_up), each[0]) for each in names.values())
    return {name: tensors[name] for name in kept}


def _refuse_two(name: str, one: object, other: object) -> None:
    if one != other:
        raise CheckpointError(f"{name} differs between ranks: make it equal first (broadcast)")


def _room_for(out: _Out) -> torch.Tensor:
    return torch.empty(out.link.whole, dtype=DTYPES[out.dtype], device="cpu")


def _is_all(parts: Sequence[_Out]) -> bool:
    """Whether these are all boxes of a tensor of a file, none of which meet."""
    held = sum(torch.Size(one.link.shape).numel() for one in parts)
    return held == torch.Size(parts[0].link.whole).numel()


def _why_not_once(links: Sequence[Link]) -> str:
    """Why these parts are not each element of their source exactly once; empty if they are."""
    step = tuple(max(steps) for steps in zip(*(link.steps for link in links), strict=True))
    boxes = tuple(box for link in links if (box := in_steps(link, step)))
    return why_not_once(cut_by(links[0].whole, step), boxes)


def _refuse_one_name(tensors: Mapping[str, _Tensor], holders: Mapping[str, tuple[int, ...]]) -> None:
    """Raises CheckpointError where the maps give two tensors of the model one name in the files.

    Boxes of one tensor of the files are none if they are all of it, and the same ranks have them.
    """
    made_of: dict[str, list[tuple[str, _Out]]] = {}
    for name, out in ((name, out) for name, one in tensors.items() for out in one.outs):
        made_of.setdefault(out.name, []).append((name, out))
    for source, parts in made_of.items():
        name, first = parts[0]
        if len(parts) > 1 and any(out.link.within is None for _, out in parts):
            raise CheckpointError(
                f"the maps call two tensors {source!r}: of {name} and of {parts[1][0]}; a file holds one "
                "of each name"
            )
        if first.link.within is not None:
            alike = {(out.link.whole, out.dtype, holders[one]) for one, out in parts}
            reason = "" if len(alike) == 1 else "they are of several types, or on other ranks (stages)"
            reason = reason or _why_not_once([out.link for _, out in parts])
            if reason:
                made = ", ".join(dict.fromkeys(one for one, _ in parts))
                raise CheckpointError(f"{source!r} of the files cannot be joined of {made}: {reason}")

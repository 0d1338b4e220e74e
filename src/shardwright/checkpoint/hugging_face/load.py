"""Folders of the safetensors files that Hugging Face's models come in: read by slices, written in shards."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from shardwright.checkpoint.agree import Call
from shardwright.checkpoint.hugging_face.conversions import Maps, maps_of
from shardwright.checkpoint.hugging_face.index import INDEX, read_index
from shardwright.checkpoint.hugging_face.maps import Link, Map, Shape, cut_by, in_steps, links_of
from shardwright.checkpoint.model_state import read_model
from shardwright.checkpoint.pieces import local_of, note_written, refuse_unwritable, views
from shardwright.checkpoint.shared_memory import memory_of, refuse_overlaps, span_of
from shardwright.checkpoint.storage.arena import Arena, room_for, usable_afterwards
from shardwright.checkpoint.storage.element_types import DTYPES
from shardwright.checkpoint.storage.manifest import SavedFile, SavedPart, SavedTensor
from shardwright.checkpoint.storage.place import folder_of
from shardwright.checkpoint.storage.reader import Reader, Want, wants
from shardwright.checkpoint.storage.safetensors_file import Place, read_header
from shardwright.checkpoint.storage.source import Source
from shardwright.comm.dtype import as_bytes
from shardwright.errors import CheckpointError, refuse_other_kind
from shardwright.index.region import Box

_SHOWN = 3
_SCALES = ("_scale_inv", "_scale")  # what they call the scales of quantized weights


class LoadedHF(NamedTuple):
    """What `load_hf` did: bytes read by this rank; names of the files' tensors that nobody asked for."""

    bytes_read: int
    unused: tuple[str, ...]


def load_hf(
    model: nn.Module,
    folder: Path | str,
    *,
    maps: Maps = (),
    device: torch.device | str = "cpu",
    buffers: Mapping[str, torch.Tensor] | None = None,
) -> LoadedHF:
    """Read a folder of safetensors files into a model, each rank only its slices.

    A collective over the world. The model may be placed by any strategy, and may be on the meta device: what
    is loaded is then made on `device`. Elements are cast, to dtypes of their kind. Nothing is executed. What
    the model's class lists as `_keys_to_ignore_on_save` or `_keys_to_ignore_on_load_missing` and no file has
    stays as it is, where it has data. A tied tensor that files have by several names must be equal there.

    Args:
        folder: with `model.safetensors`, or `model.safetensors.index.json` and its files.
        maps: how the model's tensors are those of the files (`shardwright.checkpoint.rename`, `transpose`,
            `join`, `stack`), applied in order; or `"auto"`: as `transformers` converts the files of this
            model, which is of its release 5 or later (older names and other prefixes too: a base model from
            files with a head).
        buffers: values for buffers on the meta device that no checkpoint holds (rotary tables), by name.

    Raises: CheckpointError: on every rank, with nothing changed: a tensor is missing or has another shape, a
    file is cut or contradicts itself, or a buffer without data is left. The format has no checksums: a
    flipped bit is not found.
    Cost: no communication of tensor data; memory for this rank's part, beside it where the model has data
    already or lies on another device than the CPU.
    """
    with Call() as call:
        return _loaded(call, model, folder, maps, device, buffers)


def _loaded(
    call: Call,
    model: nn.Module,
    folder: Path | str,
    maps: Maps,
    device: torch.device | str,
    buffers: Mapping[str, torch.Tensor] | None,
) -> LoadedHF:
    made: list[_Loading] = []

    def first() -> dict[str, list[Link]]:
        there = folder_of(folder)
        made.append(_Loading(model, there, maps, _device(device), buffers))
        made[0].compare()
        return made[0].links

    told = call.agreed(f"importing {folder}", first)
    loading = made[0]
    try:
        _refuse_other_links(told)
        with usable_afterwards():
            call.agreed(f"importing {folder}", loading.read)
    finally:
        loading.reader.close()
    loading.change()
    unused = tuple(sorted(set(loading.places) - loading.used))
    return LoadedHF(loading.reader.bytes_read, unused)


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise CheckpointError(f'device={device!r:.60} is no device that is here (one is "cpu")') from None


class _Loading:
    """One load: compared with the headers, read, and only then put in place."""

    maps: tuple[Map, ...]
    reader: Reader

    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        maps: Maps,
        device: torch.device,
        buffers: Mapping[str, torch.Tensor] | None,
    ) -> None:
        values = {} if buffers is None else buffers
        refuse_other_kind("buffers", values, Mapping, CheckpointError, fix="a dict of tensors by name")
        self.model, self.folder, self.device, self.buffers = model, folder, device, dict(values)
        self.given: Maps = maps
        self.places: dict[str, tuple[int, Place]] = {}
        self.links: dict[str, list[Link]] = {}
        self.copies: dict[str, list[list[Link]]] = {}  # what else the files have of a tied tensor
        self.tensors: dict[str, torch.Tensor] = {}
        self.twins: dict[str, list[torch.Tensor]] = {}  # all that are the same in memory
        self.staged: dict[str, torch.Tensor] = {}
        self.made: dict[int, torch.Tensor] = {}
        self.used: set[str] = set()

    def compare(self) -> None:
        """Find each tensor of the model in the files."""
        names, of_tensor = read_index(self.folder)
        files: list[SavedFile] = []
        for number, name in enumerate(names):
            size, places = read_header(self.folder / name)
            files.append(SavedFile(name=name, size=size, header=0, sum=""))
            chosen = [one for one in places if of_tensor is None or of_tensor.get(one) == name]
            self.places |= {tensor: (number, places[tensor]) for tensor in chosen}
        for tensor, name in (of_tensor or {}).items():
            if tensor not in self.places:
                raise CheckpointError(
                    f"{self.folder / INDEX} says that {tensor} is in {name}, where it is not: the folder is "
                    "not as it was written (files of two exports?)"
                )
        self.maps = maps_of(self.model, self.given, self.places)
        self.reader = Reader(Source(self.folder, files, 1, links=True))
        self._choose()
        wrong = {name: why for name in self.tensors if (why := list(self._differences(name)))}
        advice = self._advice(wrong) if wrong else ""
        found = [*(one for why in wrong.values() for one in why), *self._without_data()]
        if found:
            more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            shown = "; ".join(found[:_SHOWN])
            raise CheckpointError(f"{self.folder} is not of this model: {shown}{more}{advice}")

    def _advice(self, wrong: Iterable[str]) -> str:
        """What may be meant, where tensors of these names are not as in the files."""
        base = str(getattr(self.model, "base_model_prefix", "")) if self.given == "auto" else ""
        if hasattr(self.model, base) and not any(name.startswith(f"{base}.") for name in wrong):
            return (
                f"; all of {base!r} is there: load_hf(model.{base}, ...) loads that alone, and what is "
                "beside it (a new head) is yours to initialize"
            )
        unused = sorted(set(self.places) - self.used)
        auto = ', "auto" for models of transformers' if not self.maps else ""
        return f"; nothing here is {unused[0]}, which they hold (see maps={auto})" if unused else ""

    def _choose(self) -> None:
        """Of the names of a tied tensor, one that the files have; others that they have are its copies."""
        tensors = read_model(self.model).tensors
        links = {name: links_of(name, tuple(one.shape), self.maps) for name, one in tensors.items()}
        tied: dict[Hashable, list[str]] = {}
        for name, tensor in tensors.items():
            tied.setdefault(memory_of(tensor, span_of(tensor)), []).append(name)
        for names in tied.values():
            known = [name for name in names if all(link.source in self.places for link in links[name])]
            first = (known or names)[0]
            if self._makes_itself(first, tensors[first], links[first]):
                continue
            self.tensors[first], self.links[first] = tensors[first], links[first]
            self.twins[first] = [tensors[name] for name in names]
            self.copies[first] = [links[name] for name in known if links[name] != links[first]]
        self.used = {link.source for name in self.tensors for link in self._all_links(name)}

    def _all_links(self, name: str) -> Iterator[Link]:
        for links in (self.links[name], *self.copies[name]):
            yield from links

    def _makes_itself(self, name: str, tensor: torch.Tensor, links: list[Link]) -> bool:
        """Whether a tensor that no file has is one that files do without: a table of positions, say."""
        known = any(link.source in self.places for link in links)
        return not known and not tensor.is_meta and _may_be_missing(self.model, name)

    def _differences(self, name: str) -> Iterator[str]:
        mine = self.tensors[name].dtype
        for link in self._all_links(name):
            if link.source not in self.places:
                yield f"{link.source} is in no file" + ("" if link.source == name else f" (for {name})")
                continue
            dtype, shape = self.places[link.source][1][:2]
            if dtype not in DTYPES:
                yield f"{link.source} has elements of type {dtype:.60}, which are not known here"
                continue
            scales = [one for end in _SCALES if (one := f"{link.source}{end}") in self.places]
            if shape != link.whole or not _keeps(DTYPES[dtype], mine):
                there = f"{link.source} is {dtype}{list(shape)} in {self.folder.name!r}"
                yield f"{there}, {str(mine).removeprefix('torch.')}{list(link.whole)} in the model"
            elif dtype.startswith("float8") and DTYPES[dtype] != mine and scales:
                yield f"{link.source} is quantized: {dtype}, which {scales[0]} is multiplied with"

    def _without_data(self) -> Iterator[str]:
        """Buffers on the meta device without a value, and values of `buffers=` that are of none of them."""
        loaded = {id(one) for one in self.tensors.values()}
        here = {name: one for name, one in self.model.named_buffers() if one.is_meta}
        for name, one in here.items():
            if id(one) not in loaded and name not in self.buffers:
                yield f"{name} is a buffer on the meta device that is in no checkpoint: give it in buffers="
        for name, value in self.buffers.items():
            old = here.get(name)
            if old is None:
                yield f"buffers= names {name!r}, which is no buffer on the meta device"
            elif value.is_meta or value.shape != old.shape or _kind(value.dtype) != _kind(old.dtype):
                given, wanted = (f"{x.dtype}{list(x.shape)} on {x.device}" for x in (value, old))
                yield f"buffers= gives {given} for {name}, which is {wanted}"

    def read(self) -> None:
        """Read this rank's slices into new memory, which tensors on the meta device will have."""
        for name, tensor in self.tensors.items():
            refuse_unwritable(tensor, name, made=tensor.is_meta)
        refuse_overlaps(((n, span_of(x)) for n, x in self.tensors.items()), lambda *_: False)
        self._make()
        places = {name: local_of(self.made.get(id(one), one)) for name, one in self.tensors.items()}
        new = {n for n, x in places.items() if x.is_contiguous() and x.device.type == "cpu"}
        apart = [name for name in places if name not in new or id(self.tensors[name]) not in self.made]
        arena = Arena(sum(room_for(places[name].nbytes) for name in apart))
        for name in apart:
            places[name] = arena.take(tuple(places[name].shape), places[name].dtype)
            self.staged[name] = places[name]
        self._fill(places, self.links)
        for name, copies in self.copies.items():
            for links in copies:
                other = torch.empty_like(places[name])
                self._fill({name: other}, {name: links})
                _refuse_two(name, links, places[name], other)

    def _fill(self, places: Mapping[str, torch.Tensor], links: Mapping[str, list[Link]]) -> None:
        """Read this rank's slices of tensors, by name, into memory like theirs."""
        wanted: list[Want] = []
        for name, local in places.items():
            for box, view in views(self.tensors[name], local):
                for link in links[name]:
                    wanted += self._wants(link, box, view)
        self.reader.read(wanted)

    def _make(self) -> None:
        """Memory for what is on the meta device; the model has it when everything is read."""
        given = {id(one): name for name, one in self.model.named_buffers() if name in self.buffers}
        for one in (*self.tensors.values(), *self.model.buffers()):
            if one.is_meta and id(one) not in self.made:
                like = self.buffers[given[id(one)]] if id(one) in given else one.detach()
                self.made[id(one)] = _made(one, like, self.device)

    def _wants(self, link: Link, box: Box, view: torch.Tensor) -> list[Want]:
        """Where a box of the model's tensor meets one of the files' tensors, in that one's dims."""
        low = [max(a, b) for a, b in zip(link.offset, box.offset, strict=True)]
        ends = zip(link.offset, link.size, box.offset, box.size, strict=True)
        high = [min(a + n, b + m) for a, n, b, m in ends]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return []
        cut = view[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, box.offset, strict=True))]
        gone = [dim for dim in range(cut.dim()) if dim not in link.dims]
        cut = cut.permute([*link.dims, *gone]).view([high[d] - low[d] for d in link.dims])
        number, place = self.places[link.source]
        shape, (offset, size) = _in_source(link, low, high)
        whole = SavedPart(file=number, at=place.at, offset=(0,) * len(shape), size=shape, sums="")
        saved = SavedTensor(dtype=place.dtype, shape=shape, parts=(whole,))
        return wants(link.source, saved, [(Box(offset, size), cut.view(size))])

    def change(self) -> None:
        """Put what was read into place."""
        for module in self.model.modules():
            for held in (module._parameters, module._buffers):
                for name, one in held.items():
                    if one is not None and id(one) in self.made:
                        held[name] = self.made[id(one)]  # type: ignore[assignment]
        with torch.no_grad():
            for name, staged in self.staged.items():
                one = self.tensors[name]
                local_of(self.made.get(id(one), one)).copy_(staged)
        note_written(one for name in self.staged for one in self.twins[name])


def _in_source(link: Link, low: Sequence[int], high: Sequence[int]) -> tuple[Shape, tuple[Shape, Shape]]:
    """A shape of a link's source, and the box of it that a part of the link's box in the model is."""
    starts = zip(link.start, link.steps, link.dims, strict=True)
    start = tuple(at + (low[d] - link.offset[d]) * step for at, step, d in starts)
    sizes = tuple(b - a for a, b in zip(low, high, strict=True))
    if link.step is None:
        return link.whole, (start, tuple(sizes[d] for d in link.dims))
    part = link._replace(offset=tuple(low), size=sizes, within=(start, link.whole))
    box = in_steps(part, link.step)
    assert box is not None  # noqa: S101  it is cut by its own steps
    return cut_by(link.whole, link.step), box


def _refuse_other_links(told: Sequence[Mapping[str, list[Link]]]) -> None:
    """Raises CheckpointError, the same on every rank, where maps make one tensor of others on some rank."""
    known: dict[str, list[Link]] = {}
    for links in told:
        for name, one in links.items():
            if known.setdefault(name, one) != one:
                raise CheckpointError(f"maps= makes {name} of other tensors on some ranks than on others")


def _refuse_two(name: str, links: list[Link], one: torch.Tensor, other: torch.Tensor) -> None:
    """Raises CheckpointError where a tensor has other elements by another of its names."""
    if not torch.equal(as_bytes(one), as_bytes(other)):
        raise CheckpointError(
            f"{name} and {links[0].source} have different elements in the files, and are one tensor of the "
            "model: make it without the tie (config.tie_word_embeddings = False), or remove one of them"
        )


def _may_be_missing(model: nn.Module, name: str) -> bool:
    """Whether the class of a model of `transformers` says that files may lack a tensor of this name."""
    told = (getattr(model, f"_keys_to_ignore_on_{when}", None) or () for when in ("save", "load_missing"))
    return any(re.search(pattern, name) for patterns in told for pattern in patterns)


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    """What a cast may not change: floats, complex numbers and integers stay what they are."""
    return dtype.is_floating_point, dtype.is_complex


def _keeps(there: torch.dtype, here: torch.dtype) -> bool:
    """Whether elements may be cast: not to another kind, nor whole numbers to where they may wrap."""
    if _kind(there) != _kind(here) or any(_kind(there)):
        return _kind(there) == _kind(here)
    (low, high), (least, most) = _range(there), _range(here)
    return least <= low and high <= most


def _range(dtype: torch.dtype) -> tuple[int, int]:
    return (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def _made(old: torch.Tensor, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    new = torch.empty_like(like, device=device) if like.is_meta else like.to(device)
    if not isinstance(old, nn.Parameter):
        return new
    return nn.Parameter(new, requires_grad=old.requires_grad)

"""Write a state as a folder of torch's distributed checkpoint, which torch reads without this library."""

from __future__ import annotations

import contextlib
import re
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardwright.checkpoint.agree import Call, answered, rank, world
from shardwright.checkpoint.collect import Collected, Part, collect
from shardwright.checkpoint.job import Job, refuse_other_steps
from shardwright.checkpoint.others.torch_names import as_torch_nests
from shardwright.checkpoint.plan import plan_of
from shardwright.checkpoint.spread import Digests, Held_by_key
from shardwright.checkpoint.state import nodes_of
from shardwright.checkpoint.storage import disk
from shardwright.checkpoint.storage.commit import finished, tidy
from shardwright.checkpoint.storage.folder_names import Journal, look
from shardwright.checkpoint.storage.owner import saves_here, this_process
from shardwright.checkpoint.storage.place import Place, folder_of
from shardwright.checkpoint.storage.stores.local import LocalStore
from shardwright.checkpoint.storage.writer import Entry
from shardwright.errors import CheckpointError, words_of

About = Callable[[], dict[str, Any]]
_TORCHS = re.compile(r"__[0-9]+_[0-9]+\.distcp|\.metadata(\.tmp)?")  # what its writer calls its files
_MOST = 200  # bytes of a name that another is made of


def save_for_torch(
    call: Call, where: Place | str, state: Mapping[str, Any], extra: Any, about: About
) -> Path:
    """Write a folder that `torch.distributed.checkpoint.load` reads.

    A collective over the world. It is written beside `path`, and put there, whole, in one rename when rank 0
    has seen the files of all.
    Raises: CheckpointError: on every rank: as `save`; also where something stands at `path`, or a value
    differs between ranks, for torch's format has room for one.
    """
    path = call.agreed("converting the checkpoint for torch", lambda: folder_of(where))[rank()]
    begun: list[_New] = []
    try:
        under_way, nests = _prepared(call, path, state, extra, about, begun)
        _write(_Writer(path, under_way, begun), nests)
    finally:
        for new in begun:
            new.close()
    return path


def _prepared(
    call: Call, path: Path, state: Mapping[str, Any], extra: Any, about: About, begun: list[_New]
) -> tuple[Path, dict[str, Any]]:
    """Where torch writes, and what it is given, in the nests in which it names things."""
    collected, nests = Collected(), dict[str, Any]()

    def first() -> tuple[Part, dict[str, Any], Held_by_key, Digests, Path]:
        nonlocal collected
        collected = collect(nodes_of(state), extra, first_rank=rank() == 0)
        told, part = about(), collected.part()
        held = collected.held()
        if rank() == 0:
            begun.append(_New(path))
        return part, told, *held, begun[0].under_way if begun else path

    def then() -> None:
        nonlocal nests
        if not told[0][4].is_dir():
            raise CheckpointError(
                f"rank {rank()} does not see {path}, which rank 0 made: the ranks do not share "
                "this file system"
            )
        for key, one in collected.tensors.items():
            if str(one.dtype).startswith("torch.bits"):
                raise CheckpointError(f"{key}: torch's format has no {one.dtype}: save its view(torch.uint8)")
        plan = plan_of([one[2] for one in told], [one[3] for one in told])
        job = Job(call, path, "", plan, collected, told[0][1])
        entries: dict[str, list[Entry]] = {key: [] for key in job.whole}
        for entry in job.entries():
            entries[entry.key].append(entry)
        pieces = {
            key: Pieces(held.dtype, held.shape, entries[key], first=rank() == 0)
            for key, held in job.whole.items()
        }
        about_run = {name: told[0][1][name] for name in ("step", "config")}
        nests = as_torch_nests([one[0] for one in told], pieces, about_run)

    told = call.agreed("converting the checkpoint for torch", first)
    refuse_other_steps([one[1]["step"] for one in told])
    call.agreed("converting the checkpoint for torch", then)
    return told[0][4], nests


class _New:
    """A folder that is written beside its place, and put there, with all that is in it, in one rename.

    Its journal stands in it until then. A folder of such a name with a journal in it is an interrupted save,
    which the next one to the same path rolls back.
    """

    def __init__(self, path: Path) -> None:
        """Keep others out, tidy up after them, and begin.

        Raises: CheckpointError: something is there, or another process writes there.
        """
        name = path.name.encode()[:_MOST].decode(errors="ignore")
        self.id = secrets.token_hex(8)
        self.under_way = path.with_name(f".{name}.{self.id}")
        self._store, self._new = LocalStore(path), LocalStore(self.under_way)
        self._hold = self._store.hold()
        saves_here.add(self.id)
        try:
            self._tidy(re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{16}}"))
            self._refuse_other()
            self.under_way.mkdir()
            self.under_way.chmod(path.stat().st_mode)
            self._new.write(_journal(self.under_way), Journal(self.id, (), this_process()).text)
        except BaseException:
            self.close()
            raise

    def _tidy(self, pattern: re.Pattern[str]) -> None:
        with contextlib.suppress(PermissionError):  # not all may list what is beside
            for one in LocalStore(self.under_way.parent).names():
                if pattern.fullmatch(one):
                    _roll_back(LocalStore(self.under_way.with_name(one)), alone=self._hold.alone)
        tidy(self._store, finished(self._store, look(self._store)), alone=self._hold.alone)

    def _refuse_other(self) -> None:
        if found := self._store.names():
            raise CheckpointError(
                f"{self._store.place} is there and holds {found[0]!r}, which torch's format has no way to "
                'replace whole; with format="dcp" name a folder that is new'
            )

    def commit(self) -> None:
        """Put the folder in its place."""
        self._new.sync()
        self.under_way.rename(self._store.place)
        self._store.remove(_journal(self.under_way))
        disk.sync_folder(self.under_way.parent)

    def close(self) -> None:
        """Let others in; what was not committed goes, as far as the disk lets it."""
        try:
            with contextlib.suppress(OSError):
                _roll_back(self._new, mine=True)
        finally:  # Ctrl-C too
            saves_here.discard(self.id)
            self._hold.let_go(drop=True)


def _journal(under_way: Path) -> str:
    return f"saving{under_way.suffix.replace('.', '-')}.json"


def _check_there(under_way: Path) -> None:
    """Raises CheckpointError where somebody has taken away what is being written."""
    if not LocalStore(under_way).has(_journal(under_way)):
        raise CheckpointError(
            f"{under_way} was removed or emptied while it was written: look for what cleans up there, and "
            "save again"
        )


def _roll_back(store: LocalStore, *, alone: bool = True, mine: bool = False) -> None:
    """Remove a folder that a save left: its journal is in it, or nothing is, or it is `mine`."""
    if store.is_link() or not store.exists():
        return
    content = look(store)
    journal = content.journals.get(_journal(store.place))
    if not (alone or (journal is not None and journal.ended)):
        return
    for name in content.names:
        if (mine or journal is not None) and _TORCHS.fullmatch(name):
            store.remove(name)
    tidy(store, look(store))
    store.drop_empty()


def _write(writer: _Writer, nests: dict[str, Any]) -> None:
    try:
        with warnings.catch_warnings(), answered(f"writing {writer.place}"):
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is meant
            torch_checkpoint.save(nests, storage_writer=writer, planner=_Planner(), no_dist=world() == 1)
    except torch_checkpoint.CheckpointException as error:
        number, (reason, _) = min(error.failures.items())
        if isinstance(reason, CheckpointError):
            raise CheckpointError(str(reason)) from None
        raise CheckpointError(f"writing {writer.place} failed on rank {number}: {_words(reason)}") from None


def _words(reason: BaseException) -> str:
    """What went wrong; torch's writer of files says of a disk that takes no more only where it stopped."""
    cut = isinstance(reason, RuntimeError) and "inline_container" in str(reason)
    told = "the disk did not take all of a file (is it full, or over a quota?): " if cut else ""
    return f"{told}{words_of(reason)}"


class Pieces:
    """A tensor as torch's planner asks for it: what this rank writes of it."""

    def __init__(self, dtype: str, shape: Sequence[int], entries: list[Entry], *, first: bool) -> None:
        self.shape = torch.Size(shape)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.views = {entry.cell[0]: entry.view for entry in entries}
        if first and not self.shape.numel():
            nothing = torch.empty(self.shape, dtype=self.dtype, device="cpu")
            self.views = {(0,) * len(self.shape): nothing}

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        """One item for each box."""
        return [self._item(name, offset, view) for offset, view in self.views.items()]

    def _item(self, name: str, offset: tuple[int, ...], view: torch.Tensor) -> WriteItem:
        at = torch.Size(offset)
        chunk = ChunkStorageMetadata(offsets=at, sizes=view.shape)
        about = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.shape)
        return WriteItem(index=MetadataIndex(name, at), type=WriteItemType.SHARD, tensor_data=about)


class _Planner(torch_checkpoint.DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        """The elements of a box, or a value."""
        found = self.state_dict[index.fqn]
        if isinstance(found, Pieces) and index.offset is not None:
            return found.views[tuple(index.offset)].detach().cpu().contiguous()
        return found


class _Writer(torch_checkpoint.FileSystemWriter):
    def __init__(self, place: Path, under_way: Path, begun: list[_New]) -> None:
        super().__init__(under_way, single_file_per_rank=True, sync_files=True)
        self.place, self._begun = place, begun

    @property
    def checkpoint_id(self) -> Path:
        """Where it is when it is written."""
        return self.place

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what is of this rank. Raises: CheckpointError: the folder has been removed."""
        _check_there(Path(self.path))
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index when the files of all ranks are seen to be there. Raises: CheckpointError."""
        _check_there(Path(self.path))
        ends: dict[str, int] = {}
        for one in (one for of_rank in results for one in of_rank):
            place = one.storage_data
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        for name, end in ends.items():
            size = disk.size_of(Path(self.path) / name)
            if size is None or size < end:
                raise CheckpointError(
                    f"{name} was written by its rank, but the rank that commits does not find all of it in "
                    f"{self.path}: do the ranks share this file system?"
                )
        super().finish(metadata, results)
        for new in self._begun:
            new.commit()

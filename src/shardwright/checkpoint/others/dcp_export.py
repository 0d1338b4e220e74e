"""Write a state as a folder of torch's distributed checkpoint, which torch reads without this library."""

from __future__ import annotations

import contextlib
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
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from shardwright.checkpoint.agree import Call, rank, world
from shardwright.checkpoint.collect import Collected, Part, collect
from shardwright.checkpoint.job import Job, refuse_other_steps
from shardwright.checkpoint.others.torch_names import as_torch_nests
from shardwright.checkpoint.plan import plan_of
from shardwright.checkpoint.spread import Digests, Held_by_key
from shardwright.checkpoint.state import nodes_of
from shardwright.checkpoint.storage import disk
from shardwright.checkpoint.storage.place import Place, folder_of
from shardwright.checkpoint.storage.stores.local import lock_or_warn, make_folder
from shardwright.checkpoint.storage.writer import Entry
from shardwright.errors import CheckpointError, words_of

About = Callable[[], dict[str, Any]]


def save_for_torch(
    call: Call, where: Place | str, state: Mapping[str, Any], extra: Any, about: About
) -> Path:
    """Write a folder that `torch.distributed.checkpoint.load` reads.

    A collective over the world. Its index is written last, when rank 0 has seen the files of all.
    Raises: CheckpointError: on every rank: as `save`; also where something stands at `path`, or a value
    differs between ranks, for torch's format has room for one.
    """
    path = call.agreed("converting the checkpoint for torch", lambda: folder_of(where))[rank()]
    locked: list[int] = []
    try:
        nests = _prepared(call, path, state, extra, about, locked)
        _write(path, nests)
    except BaseException:
        _clean(path, locked)
        raise
    finally:
        for handle in locked:
            disk.unlock_folder(handle)
    return path


def _prepared(
    call: Call, path: Path, state: Mapping[str, Any], extra: Any, about: About, locked: list[int]
) -> dict[str, Any]:
    """What torch is given to write, in the nests in which it names things."""
    collected, nests = Collected(), dict[str, Any]()

    def first() -> tuple[Part, dict[str, Any], Held_by_key, Digests]:
        nonlocal collected
        collected = collect(nodes_of(state), extra, first_rank=rank() == 0)
        told, part = about(), collected.part()
        if rank() == 0:
            locked.append(_begin(path))
        return part, told, *collected.held()

    def then() -> None:
        nonlocal nests
        if not path.is_dir():
            raise CheckpointError(
                f"rank {rank()} does not see {path}, which rank 0 made: the ranks do not share "
                "this file system"
            )
        for key, one in collected.tensors.items():
            if str(one.dtype).startswith("torch.bits"):
                raise CheckpointError(f"{key}: torch's format has no {one.dtype}: save its view(torch.uint8)")
        plan = plan_of([held for _, _, held, _ in told], [digests for _, _, _, digests in told])
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
    refuse_other_steps([about["step"] for _, about, _, _ in told])
    call.agreed("converting the checkpoint for torch", then)
    return nests


def _begin(path: Path) -> int:
    """A folder with nothing in it, locked. Raises: CheckpointError: something is there."""
    make_folder(path)
    handle, _ = lock_or_warn(path)
    try:
        found = next(iter(sorted(one.name for one in path.iterdir())), None)
        if found is not None:
            raise CheckpointError(
                f"{path} is there and holds {found!r}: torch's format replaces file by file, so that "
                'a crash would lose it; with format="dcp" name a folder that is new'
            )
    except BaseException:
        disk.unlock_folder(handle)
        raise
    return handle


def _write(path: Path, nests: dict[str, Any]) -> None:
    writer = _Writer(path, single_file_per_rank=True, sync_files=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is meant
            torch_checkpoint.save(nests, storage_writer=writer, planner=_Planner(), no_dist=world() == 1)
    except torch_checkpoint.CheckpointException as error:
        number, (reason, _) = min(error.failures.items())
        raise CheckpointError(f"writing {path} failed on rank {number}: {_words(reason)}") from None


def _words(reason: BaseException) -> str:
    """What went wrong; torch's writer of files says of a disk that takes no more only where it stopped."""
    cut = isinstance(reason, RuntimeError) and "inline_container" in str(reason)
    told = "the disk did not take all of a file (is it full, or over a quota?): " if cut else ""
    return f"{told}{words_of(reason)}"


def _clean(path: Path, locked: list[int]) -> None:
    """Remove what was written: the rank that locked the folder has found it empty."""
    if locked:
        with contextlib.suppress(OSError):
            for one in path.iterdir():
                if one.name == ".metadata.tmp" or one.name.endswith((".distcp", ".metadata")):
                    one.unlink()
            path.rmdir()


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
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index when the files of all ranks are seen to be there. Raises: CheckpointError."""
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

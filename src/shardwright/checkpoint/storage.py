"""Bytes of a checkpoint: torch's distributed checkpoint writes and reads each rank's pieces.

It asks each DTensor which boxes of the logical tensor the rank holds, so it needs no name of a strategy.
Pieces that several ranks hold are written once. Reading fetches, for each box wanted here, the overlapping
parts of the saved boxes; no collective carries tensor data.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

from shardwright.checkpoint.agree import rank, world
from shardwright.errors import CheckpointError


def write(path: Path, entries: dict[str, Any]) -> None:
    """Write the entries (tensors or picklable objects) of all ranks; they are on the disk when it returns.

    Raises: CheckpointError: on every rank, if one failed.
    """
    with _torch_errors("writing"):
        save_state_dict(
            _with_data(entries),
            storage_writer=FileSystemWriter(path, sync_files=True),
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=world() == 1,
        )


def read(path: Path, entries: dict[str, Any]) -> None:
    """Fill the entries in place: tensors get their data, other keys their object.

    Raises: CheckpointError: on every rank, if one failed.
    """
    wanted = _with_data(entries)
    with _torch_errors("reading"):
        load_state_dict(
            wanted,
            storage_reader=FileSystemReader(path),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=world() == 1,
        )
    entries.update(wanted)


def my_files(path: Path) -> list[Path]:
    """The files that this rank has written; the index counts as rank 0's."""
    mine = sorted(path.glob(f"__{rank()}_*.distcp"))
    return [path / ".metadata", *mine] if rank() == 0 else mine


def _with_data(entries: dict[str, Any]) -> dict[str, Any]:
    """Without tensors of no elements, which have no pieces; the manifest knows them."""
    return {
        name: value.detach() if isinstance(value, torch.Tensor) else value
        for name, value in entries.items()
        if not (isinstance(value, torch.Tensor) and value.numel() == 0)
    }


@contextlib.contextmanager
def _torch_errors(doing: str) -> Iterator[None]:
    planner_log = logging.getLogger("torch.distributed.checkpoint.default_planner")
    level = planner_log.level
    planner_log.setLevel(logging.ERROR)  # it also logs what it raises
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="torch.distributed is disabled"
            )  # a world of one is fine
            yield
    except CheckpointException as error:
        failed, (reason, _trace) = next(iter(error.failures.items()))
        raise CheckpointError(f"{doing} failed on rank {failed}: {type(reason).__name__}: {reason}") from None
    except OSError as error:
        raise CheckpointError(f"{doing} failed: {error}") from None
    finally:
        planner_log.setLevel(level)

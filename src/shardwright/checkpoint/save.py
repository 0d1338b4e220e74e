"""Save a run so that a crash at any moment leaves the checkpoint before or this one, whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from shardwright.checkpoint.agree import Call, warn_without_group
from shardwright.checkpoint.job import about_run, prepared
from shardwright.checkpoint.others.dcp_export import save_for_torch
from shardwright.checkpoint.state import given
from shardwright.checkpoint.storage.place import Place
from shardwright.errors import CheckpointError

State = nn.Module | Optimizer | Sequence[Any] | Mapping[str, Any]
Format = Literal["shardwright", "dcp"]


def save(
    path: Place | str,
    model: State | None = None,
    optimizer: State | None = None,
    *,
    extra: Any = None,
    step: int | None = None,
    config: Mapping[str, Any] | None = None,
    format: Format = "shardwright",  # noqa: A002  the word that users look for
    **state: Any,
) -> Place:
    """Write a checkpoint that any mesh can load: each rank writes its pieces, copies are written once.

    A collective over the world: every rank calls it, on a file system that all of them see. When the files of
    all are on the disk, rank 0 confirms their sizes, proves that each element is stored exactly once, and
    renames the manifest into place (in object storage: writes it, last). That is the commit: before it `path`
    holds what it held, after it the new checkpoint.

    Args:
        path: the checkpoint's folder, or an address that fsspec reaches (`s3://bucket/run/1`). An older
            checkpoint of this library there is replaced; anything else there is an error.
        model: a module; its parameters and persistent buffers are saved, tied ones once.
        optimizer: one, or a list or dict of them; its state is saved by parameter name.
        extra: plain values, rank 0's; `load` returns them.
        step: how many steps were done, the same on every rank that says it; `load` returns it.
        config: settings to keep readable in the manifest (plain JSON values).
        format: `"dcp"` writes a folder of torch's distributed checkpoint instead, which
            `torch.distributed.checkpoint.load` reads without this library, in the names of its
            `get_state_dict`. It has no checksums, no generators' states and one value for all ranks; `path`
            must be new.
        state: more, by name: modules, optimizers, schedulers, data loaders or whatever else has `state_dict`
            and `load_state_dict`, generators, tensors, plain values (None is one), and dicts, lists and
            tuples of them. A value that differs between ranks is kept for each rank.

    Returns: `path`, made absolute.
    Raises: CheckpointError: on every rank, where one rank failed; what was at `path` is as it was. Causes: a
    tensor that is still to be summed, one of which ranks that should hold the same have different values, a
    value that could only be pickled, a folder that is not ours or is being written, a disk that only one rank
    sees.
    Cost: no tensor data is communicated; three gathers of descriptions, one write of each byte. Memory: 1 MiB
    beside tensors that lie on the CPU in one piece, 8 MiB beside others.
    """
    everything = given(model, optimizer) | state
    warn_without_group(path)
    wanted: str = format
    with Call() as call:
        if wanted == "dcp":
            return save_for_torch(call, path, everything, extra, about_run(step, config))
        if wanted != "shardwright":
            call.agreed("preparing the checkpoint", partial(_refuse, format))
        with prepared(call, path, everything, extra, step, config) as job:
            job.finish()
        return job.path


def _refuse(format: str) -> None:  # noqa: A002
    raise CheckpointError(f"format={format!r} is not known: 'shardwright' or 'dcp'")

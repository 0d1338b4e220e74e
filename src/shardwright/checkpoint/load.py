"""Load a checkpoint onto any mesh, entirely or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.checkpoint.agree import Call
from shardwright.checkpoint.collector import no_collection
from shardwright.checkpoint.loading import Loaded, loaded
from shardwright.checkpoint.save import State
from shardwright.checkpoint.state import given
from shardwright.checkpoint.storage.arena import usable_afterwards
from shardwright.checkpoint.storage.place import Place


def load(
    path: Place | str,
    model: State | None = None,
    optimizer: State | None = None,
    *,
    only: str | Sequence[str] | None = None,
    in_place: bool = False,
    **state: Any,
) -> Loaded:
    """Load a checkpoint into a state whose layouts may differ from those that were saved.

    A collective over the world. Each rank reads the byte ranges that it needs, and checks each chunk. Only
    when all ranks have all of it the state is changed. Generators are restored where the world has its size.

    Args:
        path: a finished checkpoint: its folder, or its address.
        model: the same parameters and buffers by name, shape and dtype; any placements.
        optimizer: of the same class; it may be fresh. What is not given stays in the checkpoint.
        only: load these of the state's tensors, values and optimizers alone, by patterns of their paths
            (`"model"`, `"model/layers.0"`, `"model/*.bias"`, `"optimizer"`); the generators stay as they are.
        in_place: read straight into the tensors, without memory beside them. What that gives up: a damaged
            file, or a rank that dies, leaves the state partly changed; then load another checkpoint.
        state: as it was saved, by name. Plain values are not changed here but returned, in `Loaded.values`;
            None asks for the value, if there is one.

    Raises: CheckpointError: on every rank, with nothing changed (but with `in_place`): the checkpoint is
    unfinished or damaged, or is of another model or optimizer; or a pattern fits nothing. Where a
    `load_state_dict` of yours raises on one rank, all are told what was loaded before it.
    Cost: no tensor data is communicated; each rank reads what it holds, and needs memory for it twice
    (the second is the system's cache of the files where it lets this user lock memory: `ulimit -l`).
    """
    everything = given(model, optimizer) | state
    with (
        Call() as call,
        no_collection(),
        usable_afterwards(),
    ):  # what a load makes is gone when the collector may look again
        return loaded(call, path, only, everything, in_place=in_place)

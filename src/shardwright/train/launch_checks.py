"""What can be known to be wrong with a run before any of its processes exists."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.checkpoint import choose
from shardwright.train.run_folder import choose_folder

if TYPE_CHECKING:
    from shardwright.train.config import TrainConfig


def check_start(config: TrainConfig) -> list[str]:
    """What a person should know before the run starts: the checkpoints that resuming skips.

    Raises: ConfigError: the folder cannot be used. CheckpointError: there is nothing to resume from.
    """
    folder = choose_folder(config)
    if config.resume is None:
        return []
    return [f"shardwright: {one}" for one in choose(folder, config.resume).skipped]

"""What can be known to be wrong with a run before any of its processes exists."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.checkpoint import choose, read_manifest
from shardwright.errors import CheckpointError
from shardwright.train.model import ModelShape
from shardwright.train.run_folder import choose_folder

if TYPE_CHECKING:
    from pathlib import Path

    from shardwright.train.config import TrainConfig


def check_start(config: TrainConfig) -> None:
    """Look at the folder of the run, and at the checkpoint that it would go on from.

    Raises: ConfigError: the folder cannot be used. CheckpointError: there is nothing to resume from, or it is
    a checkpoint of another model.
    """
    folder = choose_folder(config)
    if config.resume is not None:
        _check_same_model(choose(folder, config.resume).path, config)


def _check_same_model(path: Path, config: TrainConfig) -> None:
    """Compare settings; `load` compares the parameters themselves."""
    saved = read_manifest(path).config
    differ = [
        f"{name} is {saved[name]} in the checkpoint but {getattr(config, name)} here"
        for name in ModelShape.__dataclass_fields__
        if name in saved and saved[name] != getattr(config, name)
    ]
    if differ:
        raise CheckpointError(
            f"{path} is a checkpoint of another model: {'; '.join(differ)}. "
            "Give the settings of the checkpoint, or start a new run in another folder"
        )

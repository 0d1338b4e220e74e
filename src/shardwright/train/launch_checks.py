"""What can be known to be wrong with a run before any of its processes exists."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from shardwright.checkpoint import choose, list_checkpoints, read_manifest
from shardwright.checkpoint.storage.place import Place
from shardwright.errors import CheckpointError, ConfigError
from shardwright.train.config import TrainConfig
from shardwright.train.model import ModelShape
from shardwright.train.run_folder import choose_folder

_LEAST = 64 << 20  # bytes that a rank that is started here has for itself alone, as soon as it runs


def check_start(config: TrainConfig) -> Path:
    """Look at the folder of the run, and at the checkpoint that it would go on from; returns the folder.

    Raises: ConfigError: the folder or the devices cannot be used. CheckpointError: there is nothing to resume
    from, or it is a checkpoint of another model.
    """
    folder = choose_folder(config)
    if config.resume is not None:
        _check_same_model(choose(folder, config.resume).path, config)
    return folder


def check_devices(config: TrainConfig) -> None:
    """Whether there is memory for the ranks that are started here, and a device. Raises: ConfigError: no."""
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _LEAST
    if (config.world or 1) > most:
        raise ConfigError(
            f"--world {config.world} starts as many processes, and this machine has memory for {most} at "
            "most: choose a smaller --world, or start with torchrun on several machines"
        )
    devices = torch.cuda.device_count()
    if config.device == "cuda" and (config.world or 1) > devices:
        raise ConfigError(
            f"--world {config.world} needs as many CUDA devices, and this machine has {devices}: "
            f"use --world {devices}, or start with torchrun on several machines"
        )


def how_to_go_on(folder: Path) -> str:
    """What to do after a failure of the run in this folder."""
    committed = list_checkpoints(folder).committed
    if committed:
        return f"Go on from {committed[0].name}: the same command with --resume --out {folder}."
    return f"No checkpoint was finished yet: start again, in another folder than {folder}."


def _check_same_model(path: Place, config: TrainConfig) -> None:
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

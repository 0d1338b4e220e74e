"""Checkpoints that read placements and know no strategy by name, and of which nothing is executed."""

from shardwright.checkpoint.background import AsyncSave, async_save
from shardwright.checkpoint.folder import (
    NEWEST,
    Checkpoints,
    Choice,
    Skipped,
    choose,
    latest,
    list_checkpoints,
    prune,
    step_of,
    step_path,
)
from shardwright.checkpoint.load import Loaded, load
from shardwright.checkpoint.save import save
from shardwright.checkpoint.storage.manifest import Manifest, read_manifest

__all__ = [
    "NEWEST",
    "AsyncSave",
    "Checkpoints",
    "Choice",
    "Loaded",
    "Manifest",
    "Skipped",
    "async_save",
    "choose",
    "latest",
    "list_checkpoints",
    "load",
    "prune",
    "read_manifest",
    "save",
    "step_of",
    "step_path",
]

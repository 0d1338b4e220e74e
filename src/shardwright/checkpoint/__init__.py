"""Checkpoints that read placements and know no strategy by name.

They are unpickled when they are loaded: load only those that you trust.
"""

from shardwright.checkpoint.folder import (
    NEWEST,
    Checkpoints,
    Choice,
    Skipped,
    choose,
    list_checkpoints,
    prune,
    step_of,
    step_path,
)
from shardwright.checkpoint.load import Loaded, load
from shardwright.checkpoint.manifest import Manifest, read_manifest
from shardwright.checkpoint.save import save

__all__ = [
    "NEWEST",
    "Checkpoints",
    "Choice",
    "Loaded",
    "Manifest",
    "Skipped",
    "choose",
    "list_checkpoints",
    "load",
    "prune",
    "read_manifest",
    "save",
    "step_of",
    "step_path",
]

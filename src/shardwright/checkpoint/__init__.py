"""Checkpoints that read placements and know no strategy by name, and of which nothing is executed."""

from shardwright.checkpoint.background import AsyncSave, async_save
from shardwright.checkpoint.contents import Difference, diff, verify
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
from shardwright.checkpoint.hugging_face.export import save_hf
from shardwright.checkpoint.hugging_face.load import LoadedHF, load_hf
from shardwright.checkpoint.hugging_face.maps import join, rename, stack, transpose
from shardwright.checkpoint.load import load
from shardwright.checkpoint.loading import Loaded
from shardwright.checkpoint.others.convert import convert
from shardwright.checkpoint.save import save
from shardwright.checkpoint.storage.manifest import Manifest, read_manifest
from shardwright.checkpoint.storage.place import Address

__all__ = [
    "NEWEST",
    "Address",
    "AsyncSave",
    "Checkpoints",
    "Choice",
    "Difference",
    "Loaded",
    "LoadedHF",
    "Manifest",
    "Skipped",
    "async_save",
    "choose",
    "convert",
    "diff",
    "join",
    "latest",
    "list_checkpoints",
    "load",
    "load_hf",
    "prune",
    "read_manifest",
    "rename",
    "save",
    "save_hf",
    "stack",
    "step_of",
    "step_path",
    "transpose",
    "verify",
]

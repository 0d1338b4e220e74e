"""A reader of checkpoints that knows the manual's page and nothing of the library: json, mmap, numpy."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np

TYPES = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "int64": "<i8", "int32": "<i4", "int16": "<i2",
    "int8": "i1", "uint8": "u1", "uint16": "<u2", "uint32": "<u4", "uint64": "<u8", "bool": "?",
    "complex64": "<c8", "complex128": "<c16", "bfloat16": "<u2",
}  # fmt: skip


def manifest_of(folder: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((folder / "manifest.json").read_text())["manifest"]
    assert (body["format"], body["version"]) == ("shardwright", 2)
    return body


def read_all(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor, whole (bfloat16 as its bits)."""
    manifest = manifest_of(folder)
    maps = []
    for file in manifest["files"]:
        with (folder / file["name"]).open("rb") as stream:
            maps.append(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    found = {}
    for key, tensor in manifest["tensors"].items():
        whole = np.zeros(tensor["shape"], TYPES[tensor["dtype"]])
        for part in tensor["parts"]:
            count = int(np.prod(part["size"], dtype=np.int64))
            box = np.frombuffer(maps[part["file"]], whole.dtype, count, part["at"]).reshape(part["size"])
            whole[tuple(slice(o, o + s) for o, s in zip(part["offset"], part["size"], strict=True))] = box
        found[key] = whole
    found |= {name: found[first] for name, first in manifest["ties"].items()}
    return found

"""Checkpoints of the first format of this library: torch's storage (pickles) beside a manifest."""

from __future__ import annotations

import json
import re
from typing import Any

import xxhash

FILES = re.compile(r"__[0-9]+_[0-9]+\.distcp|\.metadata")


def manifest_of(text: bytes) -> dict[str, Any] | None:
    """The manifest of a checkpoint of version 1, whose checksum is right; None: it is none."""
    try:
        outer = json.loads(text)
        body = outer["manifest"]
        told = json.dumps(body, sort_keys=True).encode()
        ours = body["format"] == "shardwright" and body["version"] == 1
        return body if ours and outer["checksum"] == xxhash.xxh3_128_hexdigest(told) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def files_of(text: bytes) -> tuple[str, ...]:
    """The files of a checkpoint of version 1, but those with names that it never gave."""
    body = manifest_of(text)
    if body is None or not isinstance(body.get("files"), dict):
        return ()
    return tuple(name for name in body["files"] if FILES.fullmatch(name))

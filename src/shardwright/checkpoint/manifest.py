"""The manifest: what a checkpoint holds, and the proof that it is complete. It is written last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, Self

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from shardwright.errors import CheckpointError

NAME = "manifest.json"
VERSION = 1


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SavedTensor(_Part):
    """What a tensor is whatever its layout; `layout` says how it lay when it was saved, for people."""

    shape: tuple[int, ...]
    dtype: str
    layout: str | None = None

    @property
    def distributed(self) -> bool:
        """Whether it was a DTensor."""
        return self.layout is not None

    def __str__(self) -> str:
        return f"{self.dtype.removeprefix('torch.')}{list(self.shape)}"


class SavedOptimizer(_Part):
    """Class and state of an optimizer: parameter name -> state name -> tensor."""

    kind: str
    state: dict[str, dict[str, SavedTensor]]


class SavedFile(_Part):
    """Size in bytes and xxh3-128 checksum of one file."""

    size: int
    checksum: str


class Manifest(_Part):
    """Everything about a checkpoint but its data."""

    format: Literal["shardwright"] = "shardwright"
    version: int = VERSION
    library: str
    torch: str
    world: int
    step: int | None
    config: dict[str, Any]
    model: dict[str, SavedTensor]
    aliases: dict[str, str]
    objects: tuple[str, ...]
    optimizer: SavedOptimizer | None
    settings: tuple[str, ...]
    files: dict[str, SavedFile]

    def dump(self) -> str:
        """The text of the manifest file, with a checksum of itself."""
        body = self.model_dump(mode="json")
        return json.dumps({"checksum": _checksum(body), "manifest": body}, indent=1)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The manifest with this text.

        Raises: CheckpointError: the text is damaged, or a newer library wrote it.
        """
        try:
            outer = json.loads(text)
            body = outer["manifest"]
            if body.get("version", 0) > VERSION:
                raise CheckpointError(
                    f"its format is version {body['version']}, this library reads up to version {VERSION}: "
                    f"use shardwright {body.get('library', 'of a later version')}"
                )
            if outer["checksum"] != _checksum(body):
                raise CheckpointError("its manifest has been changed or damaged")
            return cls.model_validate(body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            detail = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise CheckpointError(f"its manifest cannot be read ({detail})") from None


def _checksum(body: dict[str, Any]) -> str:
    return str(xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode()))


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`.

    Raises: CheckpointError: there is no checkpoint, it was never finished, or its manifest is damaged.
    """
    _check_finished(path)
    try:
        return Manifest.parse((path / NAME).read_text(encoding="utf-8"))
    except (CheckpointError, UnicodeDecodeError, OSError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from None


def _check_finished(path: Path) -> None:
    if not path.is_dir():
        partial = path.with_name(path.name + ".partial")
        hint = f"; {partial.name} beside it was never finished" if partial.is_dir() else ""
        raise CheckpointError(f"{path} is not a checkpoint: there is no such folder{hint}")
    if path.name.endswith(".partial") or not (path / NAME).is_file():
        raise CheckpointError(
            f"{path} was never finished (the run ended while it was written): choose a finished checkpoint"
        )

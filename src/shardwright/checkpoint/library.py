"""The version of this library, for the manifest."""

from __future__ import annotations

from importlib import metadata


def library_version() -> str:
    """The installed version, or `source` where the package is used without being installed."""
    try:
        return metadata.version("shardwright")
    except metadata.PackageNotFoundError:
        return "source"

"""The version of this library, for the manifest."""

from __future__ import annotations

import sys


def library_version() -> str:
    """The version that the running source says of itself (what is installed may be another)."""
    return str(sys.modules["shardwright"].__version__)

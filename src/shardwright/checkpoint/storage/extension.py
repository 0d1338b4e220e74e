"""Modules of C. They are optional: where one was not built, or is turned off, there is another way."""

from __future__ import annotations

import importlib
import os
from typing import Any

_VARIABLE = "SHARDWRIGHT_EXTENSION"


def extension(name: str) -> Any:
    """The module of C of this name in this folder; None: there is none."""
    if os.environ.get(_VARIABLE) == "0":
        return None
    try:
        return importlib.import_module(f"shardwright.checkpoint.storage.{name}")
    except ImportError:
        return None

"""How large the package is: files, lines, and the fullest folder."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

GOAL = {"files": 200, "lines": 30_000, "in one folder": 20}


def measure(folder: Path) -> dict[str, int]:
    """Python files, their lines as `wc -l` counts them, and the most files in one folder, not below it."""
    files = sorted(folder.rglob("*.py"))
    return {
        "files": len(files),
        "lines": sum(file.read_bytes().count(b"\n") for file in files),
        "in one folder": max(Counter(file.parent for file in files).values()),
    }

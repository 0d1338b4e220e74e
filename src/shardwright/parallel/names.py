"""Which paths of a module tree a pattern of a plan names."""

from __future__ import annotations

import fnmatch


def matches(path: str, pattern: str) -> bool:
    """Name by name, as torch does: a star stands for one name; the empty pattern is the module itself."""
    names, patterns = path.split("."), pattern.split(".")
    if "" in (path, pattern):
        return path == pattern
    return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))

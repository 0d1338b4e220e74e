"""Which paths of a module tree a pattern of a plan names."""

from __future__ import annotations

import fnmatch

from shardwright.tensor.modules.wrappers import plain_path, stands_for


def matches(path: str, pattern: str) -> bool:
    """Name by name, as torch does: a star stands for one name; the empty pattern is the module itself.

    What wrappers above a module put into its path need not be in the pattern; what one holds is named by the
    wrapper, or by the whole path.
    """
    if _matches(path, pattern):
        return True
    plain = plain_path(path)
    return plain != path and stands_for(path) == path and _matches(plain, pattern)


def _matches(path: str, pattern: str) -> bool:
    names, patterns = path.split("."), pattern.split(".")
    if "" in (path, pattern):
        return path == pattern
    return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))

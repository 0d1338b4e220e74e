"""Which parts of a state are loaded: all, or those whose paths fit a pattern."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from shardwright.errors import CheckpointError

Only = str | Sequence[str] | None


class Patterns:
    """The patterns of `only=`. `fitted` are those that fit something of what was asked about.

    Args: modules: the paths of modules, of which a point leads on to those inside.
    """

    def __init__(self, only: Only, modules: Iterable[str] = ()) -> None:
        listed = hasattr(only, "__iter__") and not isinstance(only, str)
        self.all: Any = () if only is None else tuple(only) if listed else (only,)
        if not all(isinstance(pattern, str) for pattern in self.all):
            raise CheckpointError(f"only={only!r:.60}: give a pattern of paths, or a list of them")
        self.everything = only is None
        self._modules = tuple(f"{path}/" for path in modules)
        self.fitted: set[str] = set()

    def want(self, path: str) -> bool:
        """Whether a tensor or a value with this path is loaded; what stands in something is part of it."""
        if self.everything:
            return True
        names = [*self._around(path), path]
        fits = {one for one in self.all if any(name == one or fnmatchcase(name, one) for name in names)}
        self.fitted |= fits
        return bool(fits)

    def _around(self, path: str) -> Iterator[str]:
        """What this stands in: states and their containers, and modules."""
        inside = next((len(module) for module in self._modules if path.startswith(module)), len(path))
        for at, character in enumerate(path):
            if character == "/" or (character == "." and at > inside):
                yield path[:at]

    def want_whole(self, path: str) -> bool:
        """Whether an optimizer is loaded: `optimizer` and `optimizer/*` both mean all of it."""
        named, below = self.want(path), self.want(f"{path}/")
        return named or below


def refuse_unfitted(
    patterns: Patterns,
    ranks: Sequence[tuple[str, ...] | None],
    fitted: Iterable[frozenset[str]],
    optimizers: Iterable[str],
) -> None:
    """Raises CheckpointError for a pattern that fits nothing on any rank, and for ranks with other patterns.

    Args: ranks, fitted: the patterns of each, and which of them fit there. optimizers: their paths, which
        cannot be loaded in part.
    """
    for rank, given in enumerate(ranks):
        if given != ranks[0]:
            raise CheckpointError(
                f"only= is another on rank {rank} than on rank 0, so a tensor would be loaded on some of "
                "its ranks: give each rank the patterns of all (one need not fit on every rank)"
            )
    found: set[str] = set().union(*fitted)
    for pattern in patterns.all:
        if pattern not in found:
            part = next((path for path in optimizers if pattern.startswith(f"{path}/")), None)
            why = f": an optimizer is loaded as a whole, by {part!r}" if part else ""
            raise CheckpointError(
                f"only={pattern!r} fits no tensor, value or optimizer of the state that is given{why}"
            )
    if not patterns.everything and not patterns.all:
        raise CheckpointError("only= names no pattern: leave it out to load everything")

"""Where the rows of this rank stand in the whole batch, while a module draws masks by logical index.

A rank-local module sees rows `before .. before + rows` of a batch that no tensor holds. Row-major, with rows
outermost, element j of a tensor of these rows is element `before * (elements of a row) + j` of the whole one.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardwright.errors import RuleError


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows of one call on this rank.

    Args:
        before: rows of the ranks before this one.
        rows: of this rank.
    """

    before: int
    rows: int

    def first_of(self, shape: Sequence[int]) -> int:
        """The index of a tensor's first element in the whole batch's.

        Raises: RuleError: its first dim is not made of rows.
        """
        numel = 1
        for size in shape:
            numel *= size
        if not numel:
            return 0
        if not self.rows or shape[0] % self.rows:
            raise RuleError(
                f"logical dropout: a tensor of shape {tuple(shape)} does not begin with the batch's rows "
                f"({self.rows} on this rank), so the place of its elements in the whole batch is unknown\n"
                "  fix: put the rows first ([rows, ...], or [rows * tokens, ...]), or seed ranks for masks "
                'of their own: context.seed(seed, dropout="own")'
            )
        return numel // self.rows * self.before

    def begin(self, shape: Sequence[int]) -> bool:
        """Is a tensor's first dim made of rows, one each? Of one row a list of numbers may be anything."""
        return bool(shape) and shape[0] == self.rows and (len(shape) > 1 or self.rows > 1)

    def offset_of(self, shape: Sequence[int]) -> int:
        """As `first_of`; 0 for what does not begin with rows, and is one for all ranks."""
        return self.first_of(shape) if self.begin(shape) else 0


class Scope(Protocol):
    """What knows the rows: the hooks of one module."""

    @property
    def ranks(self) -> Collection[int]:
        """The ranks that read other rows."""
        ...

    def rows_of(self, key: int) -> BatchRows:
        """The rows that the draw with this key is about."""
        ...

    def draw_for(self, shape: Sequence[int]) -> tuple[int, BatchRows] | None:
        """A key, and the rows of a tensor that begins with them; None, and no draw, for any other."""
        ...


class _Open(threading.local):
    def __init__(self) -> None:
        self.scopes: tuple[Scope, ...] = ()


# Per thread, as modes of torch are: what a backward recomputes on another thread opens a scope there.
_open = _Open()


def enter(scope: Scope) -> None:
    """From here on, on this thread, draws are of rows."""
    _open.scopes = (*_open.scopes, scope)


def leave(scope: Scope) -> None:
    """Undo the last `enter` of this scope."""
    last = len(_open.scopes) - 1 - _open.scopes[::-1].index(scope)
    _open.scopes = (*_open.scopes[:last], *_open.scopes[last + 1 :])


def rows_of(key: int, ranks: Collection[int]) -> BatchRows | None:
    """The rows of a tensor on these ranks; None for one that is the whole batch, or outside of any scope.

    Raises: RuleError: the scope does not know them.
    """
    if not _open.scopes:
        return None
    scope = _open.scopes[-1]
    # A tensor that lives on the ranks which read other rows holds all rows.
    return None if len(set(ranks) & set(scope.ranks)) > 1 else scope.rows_of(key)

"""What is derived once and looked up afterwards: all such tables of the process, and one call to empty them.

A table is a table of the process, so that equal calls find it wherever they are made; `forget` is what keeps
that honest. Whatever stands here can be derived again: no answer depends on what was asked before.
Not here: state that nothing else knows (the rules that exist, the lines of a program that were compared) and
what an object keeps for itself, which goes with the object.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import _lru_cache_wrapper, lru_cache
from typing import Any, Protocol, TypeVar


class Table(Protocol):
    """What `memo` takes: a dict, a weak one, a set."""

    def clear(self) -> None:
        """Drop every entry."""

    def __len__(self) -> int: ...


_Result = TypeVar("_Result")
_Table = TypeVar("_Table", bound=Table)

_functions: list[_lru_cache_wrapper[Any]] = []
_tables: list[tuple[str, Table]] = []


def remembered(most: int) -> Callable[[Callable[..., _Result]], _lru_cache_wrapper[_Result]]:
    """Keep the newest `most` results of a function, by its arguments, until `forget`.

    Returns: `functools.lru_cache`'s own object: a call that is known costs what it costs there.
    """

    def decorate(function: Callable[..., _Result]) -> _lru_cache_wrapper[_Result]:
        made = lru_cache(maxsize=most)(function)
        _functions.append(made)
        return made

    return decorate


def memo(name: str, table: _Table) -> _Table:
    """The table itself, from now on emptied by `forget`; whoever fills it bounds it.

    Args: name: what the table holds, for `entries`.
    """
    _tables.append((name, table))
    return table


def forget() -> None:
    """Empty every table: what is asked next is derived anew, as in a new process.

    For tests, and after a change that no table can see (other devices or process groups under the same mesh).
    """
    for function in _functions:
        function.cache_clear()
    for _, table in _tables:
        table.clear()


def entries() -> dict[str, int]:
    """How many results each table holds: functions by module and name, a memo by the name it was given."""
    found = {f"{f.__module__}.{f.__qualname__}": f.cache_info().currsize for f in _functions}
    return found | {name: len(table) for name, table in _tables}

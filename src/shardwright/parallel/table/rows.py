"""A table as rows: from a mapping, a word, or a file of TOML or JSON."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardwright.errors import ParallelError
from shardwright.parallel.table.words import STRATEGIES, TENSOR, is_of_tensor, unknown

Plan = Mapping[str, Any] | str | os.PathLike[str]
_READERS = MappingProxyType({".toml": tomllib.loads, ".json": json.loads})


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy of the modules of one pattern.

    Args:
        said: of a row of tensor parallelism, the word, or `{axis: placement}`.
        options: arguments for the function of the strategy.
    """

    pattern: str
    strategy: str
    said: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.pattern!r} = {self.said if isinstance(self.said, str) else self.strategy!r}"


def read_rows(plan: Plan) -> tuple[Row, ...]:
    """The rows of a table, in its order.

    Raises: ParallelError: the file is not there or cannot be read, a word or an option is unknown, or there
        is no row; all that is wrong is said at once.
    """
    given = _mapping(plan)
    problems: list[str] = []
    rows = tuple(row for pattern, value in given.items() for row in _rows(pattern, value, problems))
    if not rows and not problems:
        problems.append('the table has no row; the shortest one is {"": "fsdp"}')
    refuse(problems)
    return rows


def refuse(problems: list[str]) -> None:
    """Raise ParallelError with everything that is wrong; nothing for an empty list."""
    if problems:
        listed = "".join(f"\n  {text}" for text in dict.fromkeys(problems))
        raise ParallelError(f"parallelize: the table cannot be applied, and nothing was changed{listed}")


def _mapping(plan: Any) -> Mapping[str, Any]:
    if isinstance(plan, Mapping):
        return plan
    if not isinstance(plan, str | os.PathLike):
        refuse([f"{plan!r} is no table: give {{pattern: strategies}}, a word for the model, or a path"])
    path = Path(plan)
    if isinstance(plan, str) and path.suffix not in _READERS:
        return {"": plan}
    if path.suffix not in _READERS:
        raise ParallelError(f"parallelize: {path} is no table; write it as .toml or .json, or as a mapping")
    try:
        found = _READERS[path.suffix](path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ParallelError(f"parallelize: the table {path} cannot be read ({error})") from None
    if not isinstance(found, Mapping):
        raise ParallelError(f"parallelize: {path} holds no table of patterns and strategies")
    return found


def _rows(pattern: Any, value: Any, problems: list[str]) -> Iterator[Row]:
    if not isinstance(pattern, str):
        problems.append(f"{pattern!r}: a pattern is a text, the name of a module with a star for one name")
        return
    for each in value if isinstance(value, list | tuple) else [value]:
        if isinstance(each, str):
            yield from _by_word(pattern, each, problems)
        elif isinstance(each, Mapping) and each:
            for name, said in each.items():
                yield from _by_name(pattern, name, said, problems)
        else:
            problems.append(f"{pattern!r} = {each!r}: give a word, a list of words, or {{word: options}}")


def _by_word(pattern: str, word: str, problems: list[str]) -> Iterator[Row]:
    if word in STRATEGIES and word != TENSOR:
        yield Row(pattern, word)
    elif is_of_tensor(word):
        yield Row(pattern, TENSOR, word)
    else:
        problems.append(f"{pattern!r}: {unknown(word)}")


def _by_name(pattern: str, name: Any, said: Any, problems: list[str]) -> Iterator[Row]:
    """`{word: options}`, `{word: true}`, or of tensor parallelism `{"tensor": word or placements}`."""
    if name == TENSOR:
        if isinstance(said, str | Mapping) and said:
            yield Row(pattern, TENSOR, said)
        else:
            problems.append(f"{pattern!r}: tensor = {said!r}: give a word, or {{axis: placement}}")
    elif name not in STRATEGIES:
        problems.append(f"{pattern!r}: {unknown(str(name))}")
    elif said is True or isinstance(said, Mapping):
        options = {} if said is True else dict(said)
        allowed = STRATEGIES[name].options
        wrong = [key for key in options if key not in allowed]
        if wrong:
            known = f"it has {', '.join(sorted(allowed))}" if allowed else "it has none"
            problems.append(f"{pattern!r}: {name} has no option {wrong[0]!r}; {known}")
        else:
            yield Row(pattern, name, None, options)
    elif said is not False:
        problems.append(f"{pattern!r}: {name} = {said!r}: give its options, {{name: value}}, or true")

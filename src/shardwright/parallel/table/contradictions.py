"""Rows of a table that cannot both be meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from shardwright.parallel.names import matches
from shardwright.parallel.table.rows import Row
from shardwright.parallel.table.words import AUTO, CONTEXT, DATA, SEQUENCE, STRATEGIES, TENSOR

Rows = Sequence[tuple["Row", Mapping[str, nn.Module]]]


def contradictions(module: nn.Module, named: Rows) -> list[str]:
    """What is wrong with the rows taken together, each said once."""
    return [*_of_whole(named), *_of_words(module, named), *_nested(named), *_of_data(module, named)]


def _of_whole(named: Rows) -> Iterator[str]:
    """What only the whole model can be told."""
    tensor = [row for row, _ in named if row.strategy == TENSOR]
    for row, _ in named:
        if row.pattern and (STRATEGIES[row.strategy].whole or row.said == AUTO):
            yield f'{row}: this is said of the whole model: write it in the row ""'
        if row.strategy == SEQUENCE and not tensor:
            yield f"{row}: it cuts the stream between what tensor parallelism cuts; add 'auto' or words"
    brought = [row for row in tensor if row.said == AUTO]
    words = [row for row in tensor if row.said != AUTO]
    if brought and words:
        yield (
            f"{brought[0]} and {words[0]} contradict each other: 'auto' is the plan that the model brings, "
            "words are a plan of your own\n    fix: one of them"
        )


def _of_words(module: nn.Module, named: Rows) -> Iterator[str]:
    """Two words of tensor parallelism for one module or parameter, by its own name."""
    rows = [row for row, _ in named if row.strategy == TENSOR and row.said != AUTO]
    if len(rows) < 2:
        return
    names = [path for path, _ in module.named_modules(remove_duplicate=False)]
    names += [path for path, _ in module.named_parameters(remove_duplicate=False)]
    for name in names:
        said = [row for row in rows if matches(name, row.pattern)]
        if any(row.said != said[0].said for row in said[1:]):
            other = next(row for row in said if row.said != said[0].said)
            yield f"{said[0]} and {other} contradict each other: both name {name or 'the model'}"
            return


def _nested(named: Rows) -> Iterator[str]:
    """A sequence is cut once."""
    cut = [(row, path, m) for row, modules in named if row.strategy == CONTEXT for path, m in modules.items()]
    for row, path, module in cut:
        inside = {child for child in module.modules() if child is not module}
        for other, inner, child in cut:
            if child in inside or (child is module and other is not row):
                yield (
                    f"{row} and {other} contradict each other: {inner or 'the model'} is inside of "
                    f"{path or 'the model'}, whose sequence is cut already"
                )
                return


def _of_data(module: nn.Module, named: Rows) -> Iterator[str]:
    """A parameter is placed over the data ranks in one way."""
    rows = [(row, modules) for row, modules in named if row.strategy in DATA]
    by_module: dict[nn.Module, Row] = {}
    for row, modules in rows:
        for path, child in modules.items():
            other = by_module.setdefault(child, row)
            if (other.strategy, dict(other.options)) != (row.strategy, dict(row.options)):
                yield f"{other} and {row} contradict each other: both name {path or 'the model'}"
                return
    taken: dict[int, Row] = {}
    for row, modules in rows:
        for child in modules.values():
            for name, parameter in child.named_parameters(recurse=True):
                other = taken.setdefault(id(parameter), row)
                if other.strategy != row.strategy:
                    yield (
                        f"{other} and {row} contradict each other: both place "
                        f"{_name(module, parameter, name)}, and data parallelism places a parameter in one "
                        "way\n    fix: one strategy for what is inside of what"
                    )
                    return


def _name(module: nn.Module, parameter: nn.Parameter, name: str) -> str:
    return next((full for full, p in module.named_parameters() if p is parameter), name)

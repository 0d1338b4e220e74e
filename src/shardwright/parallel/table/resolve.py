"""A table beside a model: which modules each row names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import axis_names
from shardwright.moe.layer import MoELayer
from shardwright.parallel.batch_norm import is_batch_norm
from shardwright.parallel.names import matches
from shardwright.parallel.pipeline.mark import is_cut, is_elsewhere
from shardwright.parallel.table.contradictions import contradictions
from shardwright.parallel.table.meshes import Axes
from shardwright.parallel.table.rows import Row, refuse
from shardwright.parallel.table.words import BATCH_NORM, EXPERT, TENSOR


@dataclass(frozen=True, slots=True)
class Named:
    """A row and the modules that its pattern names, by path."""

    row: Row
    modules: Mapping[str, nn.Module]


@dataclass(frozen=True, slots=True)
class Table:
    """All rows of a table, beside the model and the axes."""

    module: nn.Module
    named: tuple[Named, ...]
    axes: Axes

    def of(self, strategy: str) -> list[Named]:
        """The rows of one strategy."""
        return [named for named in self.named if named.row.strategy == strategy]

    def outermost(self, strategy: str) -> Iterator[tuple[Row, str, nn.Module]]:
        """The modules that rows of one strategy name, without those inside of another."""
        found = [(n.row, path, m) for n in self.of(strategy) for path, m in n.modules.items()]
        done = {child for _, _, m in found for child in m.modules() if child is not m}
        for row, path, module in found:
            if module not in done:
                done.add(module)
                yield row, path, module


def resolve(module: nn.Module, rows: Sequence[Row], axes: Axes) -> Table:
    """Find what the rows name.

    Raises: ParallelError: patterns that name nothing, rows that contradict each other, rows for which the
        context has no ranks; all of them at once.
    """
    named = tuple(Named(row, _named(module, row)) for row in rows)
    problems = [text for each in named if (text := _idle(module, each))]
    problems += axes.problems(frozenset(row.strategy for row in rows), _axes_of(module))
    problems += contradictions(module, [(n.row, n.modules) for n in named])
    refuse(problems)
    return Table(module, named, axes)


def _axes_of(module: nn.Module) -> frozenset[str]:
    """The axes of calls before the table: those that must come before a model is cut into stages."""
    placed = [p.device_mesh for p in module.parameters() if isinstance(p, TorchDTensor)]
    has_none = is_cut(module) and not any(isinstance(child, MoELayer) for child in module.modules())
    unneeded = ("ep_shard",) if has_none else ()
    return frozenset((*unneeded, *(axis for mesh in placed for axis in axis_names(mesh))))


def _named(module: nn.Module, row: Row) -> dict[str, nn.Module]:
    found: dict[nn.Module, str] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        if matches(path, row.pattern):
            found.setdefault(child, path)
    return {path: child for child, path in found.items()}


def _elsewhere(module: nn.Module) -> Iterator[str]:
    """The names inside of parts that other stages of a pipeline hold."""
    for path, part in module.named_modules():
        if is_elsewhere(part):
            yield from (f"{path}.{name}" for name, _ in part.shell.named_modules(remove_duplicate=False))


def _idle(module: nn.Module, named: Named) -> str:
    """What to say of a row that names nothing, or nothing that its strategy places; "" for the others."""
    row, inside = named.row, [child for m in named.modules.values() for child in m.modules()]
    names = (name for name, _ in module.named_parameters(remove_duplicate=False))
    if not named.modules and not any(matches(name, row.pattern) for name in _elsewhere(module)):
        if not any(matches(name, row.pattern) for name in names):
            has = ", ".join(name for name, _ in list(module.named_children())[:6]) or "no modules"
            return (
                f"{row}: no module is named so in {type(module).__name__} (it has {has}); a star stands for "
                'one name, and "" is the model itself'
            )
        if row.strategy != TENSOR:
            return f"{row}: a parameter is named so, and {row.strategy!r} places modules: name its owner"
    if is_cut(module):
        return ""
    if row.strategy == EXPERT and not any(isinstance(child, MoELayer) for child in inside):
        return f"{row}: no MoELayer (shardwright.moe) is there whose experts could be spread"
    if row.strategy == BATCH_NORM and not any(map(is_batch_norm, inside)):
        return f"{row}: no batch norm of torch is there"
    return ""

"""The calls that a table comes to, in the order in which they must be made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.moe.layer import MoELayer
from shardwright.parallel.batch_norm import is_batch_norm, parallelize_batch_norm
from shardwright.parallel.context_parallel import parallelize_context
from shardwright.parallel.expert import parallelize_expert_parallel
from shardwright.parallel.fsdp import parallelize_fsdp
from shardwright.parallel.hsdp import parallelize_hsdp
from shardwright.parallel.replicate import parallelize_replicate
from shardwright.parallel.table.resolve import Table
from shardwright.parallel.table.rows import Row
from shardwright.parallel.table.words import (
    AUTO,
    BATCH_NORM,
    CONTEXT,
    EXPERT,
    FSDP,
    HSDP,
    REPLICATE,
    SEQUENCE,
    TENSOR,
)
from shardwright.parallel.tensor_parallel import parallelize_tensor


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a public function.

    Args:
        row: that asks for it; of tensor parallelism the first of them.
        strategy: its name in the report.
        path: of the module that is placed; "" for the model.
        mesh: the axes that place it.
        apply: makes the call.
        more: how many rows ask for the same call.
    """

    row: Row
    strategy: str
    path: str
    mesh: DeviceMesh
    apply: Callable[[], object]
    more: int = 0


def calls_of(table: Table) -> list[Call]:
    """All calls: what decides what a module computes on first, what places the rest after, units last."""
    return [call for make in _IN_ORDER for call in make(table)]


def _tensor(table: Table) -> Iterator[Call]:
    """One call for the whole model: what no row names is whole on the axis."""
    rows = [named.row for named in table.of(TENSOR)]
    if rows:
        said = {row.pattern: row.said for row in rows}
        plan: Any = AUTO if said == {"": AUTO} else said
        sequence, mesh = bool(table.of(SEQUENCE)), table.axes.mesh(TENSOR)
        apply = partial(parallelize_tensor, table.module, mesh, plan, sequence_parallel=sequence)
        name = "tensor + sequence" if sequence else TENSOR
        yield Call(rows[0], name, "", mesh, apply, len(rows) - 1)


def _by_module(
    strategy: str, verb: Callable[..., object], holds: Callable[[nn.Module], bool] = lambda _: True
) -> Callable[[Table], Iterator[Call]]:
    """A call for each module that a row names, if it holds what the strategy is about."""

    def calls(table: Table) -> Iterator[Call]:
        for row, path, module in table.outermost(strategy):
            if not any(map(holds, module.modules())):
                continue
            mesh = table.axes.mesh(strategy)
            yield Call(row, strategy, path, mesh, partial(verb, module, mesh, **row.options))

    return calls


def _sharded(table: Table) -> Iterator[Call]:
    """Units from the inside to the outside, the root last."""
    named = [(path, m, n.row) for s in (FSDP, HSDP) for n in table.of(s) for path, m in n.modules.items()]
    done = set()
    for path, module, row in sorted(named, key=lambda each: -each[0].count(".") - bool(each[0])):
        if module in done:
            continue
        done.add(module)
        mesh = table.axes.mesh(row.strategy)
        placed = partial(_UNITS[row.strategy], module, mesh, **row.options)
        if row.strategy == HSDP:
            placed = partial(placed, shard_dim=table.axes.shard)
        yield Call(row, row.strategy, path, mesh, placed)


_UNITS: Mapping[str, Callable[..., object]] = MappingProxyType(
    {FSDP: parallelize_fsdp, HSDP: parallelize_hsdp}
)
_IN_ORDER = (
    _tensor,
    _by_module(EXPERT, parallelize_expert_parallel, lambda m: isinstance(m, MoELayer)),
    _by_module(CONTEXT, parallelize_context),
    _by_module(BATCH_NORM, parallelize_batch_norm, is_batch_norm),
    _by_module(REPLICATE, parallelize_replicate),
    _sharded,
)

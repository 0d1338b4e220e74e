"""Three and four strategies at once, by one table: which, on which degrees, and what each must equal.

`python -m tests.compositions.tables_sweep` tries every set with every variant on up to 8 ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

REPLICATE, FSDP, HSDP, TENSOR = "replicate", "fsdp", "hsdp", "tensor"
SEQUENCE, CONTEXT, EXPERT = "sequence", "context", "expert"
_DEGREE = {TENSOR: "tensor_parallel", CONTEXT: "context_parallel_shard", FSDP: "data_parallel_shard"}


@dataclass(frozen=True)
class Variant:
    """How a model is trained.

    Args:
        recompute: blocks by activation checkpointing.
        backwards: before one sum of gradients.
        optimizer: "SGD" or "AdamW".
    """

    recompute: bool
    backwards: int
    optimizer: str


VARIANTS = tuple(
    Variant(recompute, backwards, optimizer)
    for recompute, backwards, optimizer in (
        (False, 1, "AdamW"),
        (True, 1, "SGD"),
        (False, 3, "SGD"),
        (True, 3, "AdamW"),
    )
)

_WITH_ONE = [
    (data, *others)
    for others in ((TENSOR, SEQUENCE), (TENSOR, CONTEXT), (TENSOR, EXPERT), (CONTEXT, EXPERT))
    for data in (REPLICATE, FSDP, HSDP)
]
_WITH_TWO = [(REPLICATE, data, other) for data in (FSDP, HSDP) for other in (TENSOR, CONTEXT, EXPERT)]
TRIPLES = (*_WITH_ONE, *_WITH_TWO, (TENSOR, SEQUENCE, CONTEXT), (TENSOR, CONTEXT, EXPERT))
QUADRUPLES = (
    (REPLICATE, TENSOR, SEQUENCE, CONTEXT),
    (FSDP, TENSOR, SEQUENCE, CONTEXT),
    (REPLICATE, TENSOR, CONTEXT, EXPERT),
    (FSDP, TENSOR, CONTEXT, EXPERT),
    (HSDP, TENSOR, SEQUENCE, EXPERT),
    (REPLICATE, FSDP, TENSOR, EXPERT),
    (REPLICATE, FSDP, CONTEXT, EXPERT),
)


def degrees_of(strategies: tuple[str, ...]) -> dict[str, int]:
    """Two ranks for each strategy that has an axis; four for HSDP, where there are enough; experts over two.

    HSDP beside two others that take ranks cuts over one rank and replicates over two: its calls are the same.
    """
    found = {_DEGREE[s]: 2 for s in strategies if s in _DEGREE}
    if HSDP in strategies:
        wide = {TENSOR, CONTEXT} <= set(strategies)
        found |= {"data_parallel_replicate": 2, "data_parallel_shard": 1 if wide else 2}
    elif REPLICATE in strategies and FSDP not in strategies:
        found["data_parallel_replicate"] = 2
    if EXPERT in strategies:
        found["expert_parallel"] = 2
    return found


def table_of(strategies: tuple[str, ...]) -> dict[str, object]:
    """The rows: what is said of the whole model, of its matrices, and of its blocks."""
    whole = [s for s in (SEQUENCE, EXPERT, CONTEXT) if s in strategies]
    rows: dict[str, object] = {}
    if TENSOR in strategies:
        rows |= dict.fromkeys((f"blocks.*.{name}" for name in ("q", "k", "v", "up")), "colwise")
        rows |= dict.fromkeys((f"blocks.*.{name}" for name in ("o", "down")), "rowwise")
    units = next((s for s in (HSDP, FSDP) if s in strategies), None)
    if units is not None:
        rows["blocks.*"] = units
    if REPLICATE in strategies and units is not None:
        rows |= dict.fromkeys(("embed", "norm", "head"), REPLICATE)
    elif units is not None or REPLICATE in strategies:
        whole.append(units or REPLICATE)
    return {**rows, "": whole} if whole else rows


def world_of(strategies: tuple[str, ...]) -> int:
    """How many ranks."""
    return prod(n for name, n in degrees_of(strategies).items() if name != "expert_parallel")


def cases() -> Iterator[tuple[tuple[str, ...], Variant]]:
    """Every set with every variant."""
    yield from itertools.product((*TRIPLES, *QUADRUPLES), VARIANTS)

"""A pipeline together with one, two and three other strategies: which, on which axes, in which order.

`python -m tests.compositions.pipelines_sweep` tries every set with every variant on up to 8 ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.pipeline.ranks import Case

_AXES = {
    "pipeline": {"pp": 2},
    "replicate": {"dp": 2},
    "fsdp": {"dp": 2},
    "hsdp": {"copies": 2, "dp": 2},
    "context": {"cp": 2},
    "tensor": {"tp": 2},
    "sequence": {"tp": 2},
}
_ORDER = ("tensor", "sequence", "context", "pipeline", "replicate", "fsdp", "hsdp")

PAIRS = tuple(("pipeline", other) for other in ("replicate", "fsdp", "hsdp", "tensor", "context"))
TRIPLES = (
    ("pipeline", "tensor", "sequence"),
    ("pipeline", "tensor", "replicate"),
    ("pipeline", "tensor", "fsdp"),
    ("pipeline", "context", "replicate"),
    ("pipeline", "context", "fsdp"),
    ("pipeline", "tensor", "context"),
)
QUADRUPLES = (
    ("pipeline", "tensor", "sequence", "replicate"),
    ("pipeline", "tensor", "sequence", "fsdp"),
    ("pipeline", "tensor", "sequence", "context"),
)
VARIANTS: tuple[dict[str, Any], ...] = (
    {"name": "llama", "optimizer": "AdamW"},
    {"name": "tied llama", "optimizer": "SGD", "accumulate": 3},
    {"name": "tied llama", "optimizer": "AdamW", "stages": 4},
    {"name": "llama", "optimizer": "SGD", "schedule": "gpipe"},
)


def case_of(strategies: tuple[str, ...], variant: dict[str, Any]) -> Case:
    """The case: axes of two ranks, strategies in the order in which they must be applied."""
    axes: dict[str, int] = {}
    for name in ("pipeline", "replicate", "fsdp", "hsdp", "context", "tensor"):
        if name in strategies:
            axes |= _AXES[name]
    said = [s for s in strategies if not (s == "tensor" and "sequence" in strategies)]
    how = tuple(sorted(said, key=_ORDER.index))
    return replace(Case("llama", axes, how, micro=2), **variant)


def cases() -> Iterator[Case]:
    """Every set with every variant, five steps each."""
    for strategies in (*PAIRS, *TRIPLES, *QUADRUPLES):
        for variant in VARIANTS:
            yield replace(case_of(strategies, variant), steps=5)

"""Attention over parts of the keys: who holds which, and what combining the parts costs. Pure.

Each rank attends to the keys that it holds; the results are averaged with the weights that the logs of the
sums give (the online softmax). Source: Milakov, Gimelshein, "Online normalizer calculation for softmax",
arXiv 1805.02867, section 3; Rabe, Staats, arXiv 2112.05682.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardwright.errors import RuleError
from shardwright.layout.applied import cut_form
from shardwright.layout.layout import Layout
from shardwright.placement.base import Partition, Placement, Replicate
from shardwright.placement.one_dim_form import along
from shardwright.rules.call import Call
from shardwright.rules.catalog.attention import takes_mask
from shardwright.rules.decision import Decision, LabelSize
from shardwright.rules.held_label import Held
from shardwright.rules.price import layout_bytes
from shardwright.rules.propagate import propagate_one

_SEQUENCE = 2  # of [batch, head, sequence, features]


@dataclass(frozen=True)
class KeyParts:
    """How to run a call whose keys are cut along the sequence.

    Args:
        inputs: the layout that each tensor operand must have.
        outputs: the layouts of the results, finished.
        axes: the mesh axes that cut the keys.
        keys: the sequence of the keys, with its cuts.
        queries: that of the queries.
        bytes: that a rank sends, about.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout | None, ...]
    axes: tuple[int, ...]
    keys: LabelSize
    queries: LabelSize
    bytes: int

    def held(self, coords: tuple[int, ...]) -> tuple[Held, Held]:
        """Which queries and keys these coords hold."""
        return self.queries.held_at(coords), self.keys.held_at(coords)


def plan_key_parts(call: Call, layouts: Sequence[Layout]) -> KeyParts | None:
    """The plan for a call, or None where no axis cuts the keys along the sequence."""
    names = tuple(operand.name for operand in call.flat_operands)
    if call.arg("dropout_p") or not takes_mask(call) or 0 in call.arg("query").shape + call.arg("key").shape:
        return None
    key = layouts[names.index("key")]
    cuts = _cuts(key)
    if not cuts:
        return None
    bare = tuple(layout.with_placements(dict.fromkeys(cuts, Replicate())) for layout in layouts)
    decision = propagate_one(call, bare)
    if decision.fallback:
        return None
    inputs = tuple(
        layout.with_placements({axis: _placed(name, layout, part, key) for axis, part in cuts.items()})
        for name, layout in zip(names, decision.inputs, strict=True)
    )
    moved = sum(layout_bytes(have, want) for have, want in zip(layouts, inputs, strict=True))
    sizes = key.sizes
    return KeyParts(
        inputs,
        decision.outputs,
        tuple(cuts),
        LabelSize(key.shape[_SEQUENCE], tuple((axis, sizes[axis], part) for axis, part in cuts.items())),
        _queries(call, decision),
        moved + _combining(decision.outputs[0], cuts),
    )


def _cuts(key: Layout) -> dict[int, Partition]:
    """The axes that cut the sequence of the keys, in order of application, each as a 1-d partition."""
    found: dict[int, Partition] = {}
    for axis in key.order:
        placement, n = key.placements[axis], key.sizes[axis]
        if n == 1 or not isinstance(placement, Partition):
            continue
        form = cut_form(key, axis)
        if form is not None and form[0] == _SEQUENCE:
            found[axis] = form[1]
    return found


def _placed(name: str, layout: Layout, part: Partition, key: Layout) -> Placement:
    """Keys, values and a mask with a column per key are cut; queries are whole."""
    if name in {"key", "value"}:
        dim = _SEQUENCE
    elif name == "attn_mask" and layout.shape[-1] == key.shape[_SEQUENCE]:
        dim = len(layout.shape) - 1
    else:
        return Replicate()
    placed = along(part, dim)
    if placed is None:
        raise RuleError(f"{part} is a cut along dim {_SEQUENCE}, but has no meaning along dim {dim}")
    return placed


def _queries(call: Call, decision: Decision) -> LabelSize:
    """The sequence of the queries as the other axes cut it."""
    if decision.local is not None:
        return dict(decision.local.labels)["l"]
    return LabelSize(call.arg("query").shape[_SEQUENCE])


def _combining(out: Layout | None, cuts: dict[int, Partition]) -> int:
    """A maximum, a sum of weights and a weighted row for every query, reduced over each axis in float32."""
    if out is None:
        return 0
    others = [n for p, n in zip(out.placements, out.sizes, strict=True) if p.is_partition]
    rows = -(-prod(out.shape[:-1]) // max(1, prod(others)))
    numbers = rows * (out.shape[-1] + 2)
    return sum(2 * (out.sizes[axis] - 1) * numbers * 4 // out.sizes[axis] for axis in cuts)

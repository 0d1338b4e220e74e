"""A decision without its sizes predicts the decision for every other size, or there is none."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from shardwright.layout.layout import Layout
from shardwright.placement.base import Replicate
from shardwright.placement.interleaved import Interleaved
from shardwright.placement.partial import Partial
from shardwright.placement.ragged import Ragged
from shardwright.placement.shard import Shard
from shardwright.placement.zigzag import ZigZag
from shardwright.rules import propagate
from tests.rules.calls import aten, call, mesh, meta

R, P = Replicate(), Partial("sum")
ON = mesh(dp=2, tp=3)
PLACEMENTS = ((Shard(0), R), (R, Shard(1)), (Shard(0), Shard(0)), (R, R), (P, Shard(0)), (ZigZag(0), P))
# Per op: the call for sizes a, b, c.
OPS = {
    "add": lambda a, b, _c: call(aten.add.Tensor, meta(a, b), meta(a, b)),
    "bias": lambda a, b, _c: call(aten.add.Tensor, meta(a, b), meta(b)),
    "in place": lambda a, b, _c: call(aten.mul_.Tensor, meta(a, b), meta(a, 1)),
    "exp": lambda a, b, _c: call(aten.exp.default, meta(a, b).t()),
    "mm": lambda a, b, c: call(aten.mm.default, meta(a, b), meta(b, c)),
    "addmm": lambda a, b, c: call(aten.addmm.default, meta(c), meta(a, b), meta(b, c)),
    "softmax": lambda a, b, _c: call(aten._softmax.default, meta(a, b), -1, False),
    "layer_norm": lambda a, b, _c: call(
        aten.native_layer_norm.default, meta(a, b), [b], meta(b), meta(b), 1e-5
    ),
    "sum": lambda a, b, _c: call(aten.sum.dim_IntList, meta(a, b), [1]),
    "transpose": lambda a, b, _c: call(aten.t.default, meta(a, b)),
    "permute": lambda a, b, c: call(aten.permute.default, meta(a, b, c), [2, 0, 1]),
    "embedding": lambda a, b, c: call(aten.embedding.default, meta(a, b), meta(c, dtype=torch.int64)),
}
SIZES = ((12, 6, 18), (7, 5, 3), (13, 2, 4), (2, 9, 5))


def _layouts(made, placements) -> list[Layout] | None:
    found = []
    for info, own in zip(made.operands, placements, strict=True):
        if any(p.is_partition and getattr(p, "dim", 0) >= len(info.shape) for p in own):
            return None
        if not info.dtype.is_floating_point and any(p.is_pending for p in own):
            return None
        found.append(Layout(ON, own, info.shape, dtype=info.dtype, stride=info.stride))
    return found


@pytest.mark.parametrize("name", OPS)
def test_what_is_decided_for_one_size_holds_for_the_others(name: str) -> None:
    """The predicted layouts are those that propagation finds for the other sizes, from each size to each."""
    make, served = OPS[name], 0
    calls = [make(*sizes) for sizes in SIZES]
    for placements in product(PLACEMENTS, repeat=len(calls[0].operands)):
        layouts = [_layouts(made, placements) for made in calls]
        if layouts[0] is None:
            continue
        decisions = [propagate(made, own) for made, own in zip(calls, layouts, strict=True)]
        form = decisions[0].any_size
        served += form is not None
        for made, own, decision in zip(calls, layouts, decisions, strict=True):
            if form is None:
                continue
            shapes = [layout.shape for layout in own]
            assert form.fits(shapes, [made.arg(argument) for argument, _ in form.arguments])
            outputs = [Layout.of_kind(result.kind, result.shape(shapes)) for result in form.results]
            assert tuple(outputs) == decision.outputs
            assert [str(layout) for layout in outputs] == [str(layout) for layout in decision.outputs]
            wanted = list(own)
            for operand, kind in form.moved:
                wanted[operand] = Layout.of_kind(kind, shapes[operand])
            assert tuple(wanted) == decision.inputs
    assert served


def _form(made, *placements):
    layouts = _layouts(made, placements)
    return propagate(made, layouts).any_size


def test_sizes_that_disagree_do_not_fit() -> None:
    form = _form(OPS["mm"](6, 4, 8), (Shard(0), R), (R, R))
    assert form.fits([(9, 5), (5, 7)], [])
    assert not form.fits([(9, 5), (4, 7)], [])


def test_a_shape_argument_must_be_the_shape() -> None:
    form = _form(OPS["layer_norm"](6, 4, 0), (Shard(0), R), (R, R), (R, R))
    assert form.fits([(9, 5), (5,), (5,)], [[5]])
    assert not form.fits([(9, 5), (5,), (5,)], [[4]])


@pytest.mark.parametrize(
    ("made", "placements"),
    [
        (OPS["add"](6, 4, 0), ((Shard(0), R), (Shard(1), R))),
        (OPS["exp"](6, 4, 0), ((P, R),)),
        (call(aten.view.default, meta(6, 4), [24]), ((Shard(0), R),)),
        (OPS["addmm"](6, 4, 8), ((R, R), (R, Shard(1)), (R, Shard(0)))),
        (OPS["exp"](6, 4, 0), ((Ragged((1, 2), (0,)), R),)),
        (call(aten.glu.default, meta(2, 4), 0), ((R, Shard(1)),)),
    ],
    ids=(
        "bytes are compared",
        "something is reduced",
        "dims are merged",
        "parts may be empty",
        "ragged",
        "half of two is one by chance",
    ),
)
def test_a_decision_that_looked_at_sizes_has_no_such_form(made, placements) -> None:
    assert _form(made, *placements) is None


def test_layouts_of_a_kind_differ_in_sizes_only() -> None:
    """Classes of sizes (0, 1, more), placements, order, dtype and the order of the strides make the kind."""
    base = Layout(ON, (Shard(0), P), (6, 4), dtype=meta(1).dtype)
    assert base.kind is Layout(ON, (Shard(0), P), (7, 9), dtype=base.dtype).kind
    assert Layout.of_kind(base.kind, (7, 9)) == Layout(ON, (Shard(0), P), (7, 9), dtype=base.dtype)
    others = [
        Layout(ON, (Shard(1), P), (6, 4), dtype=base.dtype),
        Layout(ON, (Shard(0), P), (6, 1), dtype=base.dtype),
        Layout(ON, (Shard(0), P), (6, 0), dtype=base.dtype),
        Layout(ON, (Shard(0), P), (6, 4), dtype=base.dtype, stride=(1, 6)),
        Layout(mesh(dp=3, tp=2), (Shard(0), P), (6, 4), dtype=base.dtype),
    ]
    assert len({base.kind, *(layout.kind for layout in others)}) == 1 + len(others)
    assert Layout(ON, (Interleaved(0, 2), P), (6, 4), dtype=base.dtype).kind is not None
    assert Layout(ON, (Ragged((1, 2), (0,)), P), (6, 4), dtype=base.dtype).kind is None
    assert Layout(ON, (Shard(0), P), (6, 4), dtype=base.dtype, stride=(0, 1)).kind is None

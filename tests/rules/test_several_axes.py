"""Rules are stated for one axis; n axes follow by induction. Checked on random layouts over random meshes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwright.layout.layout import Layout
from shardwright.placement.base import Placement, Replicate
from shardwright.rules import TensorInfo, propagate
from shardwright.testing.simulate import Sample, in_double, run_whole, simulate
from tests.generators import meshes, partitions, pendings
from tests.tiers import one_in

aten = torch.ops.aten


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


SAMPLES = {
    "add": (aten.add.Tensor, Sample((_randn(5, 4), _randn(4)))),
    "add in place": (aten.add_.Tensor, Sample((_randn(5, 4), _randn(5, 1)))),
    "exp": (aten.exp.default, Sample((_randn(5, 4, 3),))),
    "mul": (aten.mul.Tensor, Sample((_randn(5, 4), _randn(5, 4)))),
    "mm": (aten.mm.default, Sample((_randn(5, 6), _randn(6, 4)))),
    "addmm": (aten.addmm.default, Sample((_randn(4), _randn(5, 6), _randn(6, 4)))),
    "bmm": (aten.bmm.default, Sample((_randn(3, 5, 2), _randn(3, 2, 4)))),
    "merge": (aten.view.default, Sample((_randn(4, 5, 6), [20, 6]))),
    "split": (aten.view.default, Sample((_randn(5, 12), [5, 4, 3]))),
    "regroup": (aten.view.default, Sample((_randn(4, 6), [8, 3]))),
    "expand": (aten.expand.default, Sample((_randn(1, 5), [3, 4, 5]))),
    "permute": (aten.permute.default, Sample((_randn(4, 5, 6), [2, 0, 1]))),
    "sum": (aten.sum.dim_IntList, Sample((_randn(5, 6, 3), [1]))),
    "amax": (aten.amax.default, Sample((_randn(5, 6), [0], True))),
    "softmax": (aten._softmax.default, Sample((_randn(5, 6, 3), 1, False))),
    "layer_norm": (
        aten.native_layer_norm.default,
        Sample((_randn(5, 6, 4), [4], _randn(4), _randn(4), 1e-5)),
    ),
    "embedding": (aten.embedding.default, Sample((_randn(7, 4), torch.tensor([[1, 2, 6], [0, 3, 3]])))),
    "cat": (aten.cat.default, Sample(([_randn(5, 4), _randn(5, 3)], 1))),
    "split in parts": (aten.split.Tensor, Sample((_randn(5, 12), 4, 1))),
    "new_zeros": (aten.new_zeros.default, Sample((_randn(5, 4), [5, 4]))),
    "where": (aten.where.self, Sample((_randn(5, 4) > 0, _randn(5, 4), _randn(4)))),
    "attention": (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        Sample((_randn(3, 4, 5, 2), _randn(3, 4, 6, 2), _randn(3, 4, 6, 2))),
    ),
    "foreach": (aten._foreach_add_.List, Sample(([_randn(5, 4), _randn(3)], [_randn(5, 4), _randn(3)]))),
}


@pytest.mark.parametrize("name", one_in(3, SAMPLES))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_a_decision_gives_the_single_device_answer(name: str, data: st.DataObject) -> None:
    """`join(op(split(x))) == op(x)` for the layouts that propagate chooses, on every mesh and order."""
    op, sample = SAMPLES[name]
    whole = run_whole(op, in_double(sample))
    mesh = data.draw(meshes(((2,), (3,), (2, 2), (2, 3), (2, 2, 2))), label="mesh")
    layouts = []
    for info in whole.call.operands:
        placements = [data.draw(_placements(info, n)) for n in mesh.sizes]
        order = data.draw(st.permutations(mesh.axes))
        layouts.append(
            Layout(mesh, placements, info.shape, dtype=info.dtype, stride=info.stride, order=order)
        )
    decision = propagate(whole.call, layouts)
    parts = [
        [layout.split(x, layout.coords_of(rank)) for rank in mesh.ranks]
        for layout, x in zip(decision.inputs, whole.tensors, strict=True)
    ]
    simulate(whole, decision, parts)


def _placements(info: TensorInfo, n: int) -> st.SearchStrategy[Placement]:
    part = st.one_of(partitions(len(info.shape), n, info.shape), st.just(Replicate()))
    return st.one_of(part, pendings(("sum", "max"))) if info.dtype.is_floating_point else part

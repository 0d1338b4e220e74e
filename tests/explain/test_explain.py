"""`explain` prints the rule, what moves, the price, and what else could be done at which price."""

from __future__ import annotations

import importlib

import pytest
import torch

import shardwright as sw
from shardwright.errors import LayoutError, PlanError, RuleError
from shardwright.layout.mesh_shape import MeshShape

ON = MeshShape(("dp", "tp"), (2, 4))


def _layout(*shape: int, **placements: object) -> sw.Layout:
    return sw.Layout(ON, placements, shape, dtype=torch.float32)


def test_the_ways_of_each_axis_and_their_prices() -> None:
    text = str(sw.explain("aten::add.Tensor", _layout(8, 4, tp=sw.Shard(0)), _layout(8, 4, tp=sw.Shard(1))))
    assert text == (
        "aten::add.Tensor: [*... -> ...] dp: whole; tp: cut ...-1 as S(0)\n"
        "  self     f32[8@tp, 4]   as it is\n"
        "  other    f32[8, 4@tp]   -> f32[8@tp, 4]   192 B over all ranks\n"
        "  result   f32[8@tp, 4]\n"
        "  price    dp: whole; tp: cut ...-1 as S(0): 24 B sent by each rank, 1/4 of the work\n"
        "  instead  tp: cut ...-0 as S(0): 24 B sent by each rank, 1/4 of the work\n"
        "  instead  tp: whole: 192 B sent by each rank, all of the work\n"
        "  rule     aten::add: add(call)"
    )


def test_an_operand_that_is_written_is_said_to_be_brought_back() -> None:
    text = str(sw.explain("aten::add_.Tensor", _layout(8, 4), _layout(8, 4, tp=sw.Partial())))
    assert "tp: self+other: sum->sum: 0 B sent by each rank, all of the work, a written operand" in text


def test_the_chosen_way_is_the_cheapest() -> None:
    found = sw.explain("aten::mm", _layout(8, 16, dp=sw.Shard(0)), _layout(16, 4, tp=sw.Shard(0)))
    assert all((way.rewritten, way.bytes) >= (0, found.way.bytes) for way in found.alternatives)
    assert {way.text.partition(":")[0] for way in found.alternatives} == {"dp", "tp"}


@torch.library.custom_op("tests_explain::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@opaque.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_op_without_a_rule_says_so() -> None:
    found = sw.explain("tests_explain::opaque", _layout(4, 4, tp=sw.Shard(0)))
    assert found.way is None
    assert str(found).startswith("tests_explain::opaque: no rule; every operand is made whole")


def test_the_function_is_found_whatever_was_imported_first() -> None:
    """`shardwright.show` is also the name of a layer of the package."""
    importlib.import_module("shardwright.show.op")
    assert str(sw.explain("aten::relu", _layout(4, 4))).startswith("aten::relu")


def test_what_is_no_op_is_refused_with_a_spelling() -> None:
    with pytest.raises(RuleError, match=r"mm is no op: .* write it like 'aten::mm'"):
        sw.explain(torch.mm, _layout(4, 4), _layout(4, 4))


@pytest.mark.parametrize(
    ("name", "more", "meant"),
    [
        ("aten::sum", (), "aten::sum"),
        ("aten::sum", ([0],), "aten::sum.dim_IntList"),
        ("aten::sort", (), "aten::sort"),
        ("aten::pow", (2,), "aten::pow.Tensor_Scalar"),
        ("aten::clamp", (0.0, 1.0), "aten::clamp"),
        ("aten::mul", (_layout(4, 4),), "aten::mul.Tensor"),
    ],
)
def test_a_bare_name_means_the_overload_that_takes_the_operands(
    name: str, more: tuple[object, ...], meant: str
) -> None:
    assert sw.explain(name, _layout(4, 4), *more).op.name() == meant


def test_operands_that_no_overload_takes_are_refused_by_the_likeliest() -> None:
    with pytest.raises(RuleError, match=r"aten::mul.Tensor refuses these operands"):
        sw.explain("aten::mul", _layout(4, 4), "text")
    with pytest.raises(RuleError, match=r"aten::mul has no overload 'Tensr'; it has Tensor, Scalar"):
        sw.explain("aten::mul.Tensr", _layout(4, 4), 2)


def test_an_op_whose_shape_only_data_can_tell_says_so() -> None:
    with pytest.raises(RuleError, match=r"aten::nonzero cannot be explained: .* sw.trace\(\) lists"):
        sw.explain("aten::nonzero", _layout(4, 4))


def test_a_plain_tensor_is_not_left_out_of_what_is_told() -> None:
    with pytest.raises(RuleError, match=r"a plain tensor of shape \(4, 4\) has no layout"):
        sw.explain("aten::mm", _layout(4, 4), torch.ones(4, 4))


def test_an_op_that_reads_no_tensor_is_refused() -> None:
    with pytest.raises(RuleError, match=r"aten::randn of no distributed tensor sends nothing"):
        sw.explain("aten::randn", [4])


def test_what_is_no_layout_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match="'float32' is no dtype"):
        sw.Layout(ON, {}, (4,), dtype="float32")
    with pytest.raises(PlanError, match=r"takes two layouts, got a Tensor: sw.layout_of"):
        sw.plan_redistribution(_layout(4), torch.ones(4))

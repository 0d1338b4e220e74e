"""What propagation chooses: tables of layouts, prices, and what it refuses."""

from __future__ import annotations

import pytest
import torch

import shardwright.rules.registry as registry_module
from shardwright.errors import RuleError
from shardwright.layout.layout import Layout
from shardwright.placement.base import Replicate
from shardwright.placement.block_cyclic import BlockCyclic
from shardwright.placement.interleaved import Interleaved
from shardwright.placement.owner import Owner
from shardwright.placement.partial import Partial
from shardwright.placement.ragged import Ragged
from shardwright.placement.shard import Shard
from shardwright.placement.zigzag import ZigZag
from shardwright.rules import identity_of, propagate, register_rule, remove_rule, rule, rules_of
from tests.rules.calls import aten, call, decide, mesh, meta, shown

R, P = Replicate(), Partial("sum")
TP = mesh(tp=2)
DT = mesh(dp=2, tp=4)

MM = call(aten.mm.default, meta(8, 6), meta(6, 4))
ADD = call(aten.add.Tensor, meta(8, 6), meta(8, 6))
MUL = call(aten.mul.Tensor, meta(8, 6), meta(8, 6))
EXP = call(aten.exp.default, meta(8, 6))
SUM = call(aten.sum.dim_IntList, meta(8, 6), [0])
MERGE = call(aten.view.default, meta(4, 3, 8), [12, 8])
MERGE_UNEVEN = call(aten.view.default, meta(3, 4, 8), [12, 8])
SPLIT = call(aten.view.default, meta(5, 12), [5, 4, 3])
# An op that the catalog will never have a rule for.
_NAMELESS = torch.library.Library("nameless", "DEF")
_NAMELESS.define("cross(Tensor self, Tensor other, int dim=-1) -> Tensor")
_NAMELESS.impl("cross", lambda x, y, dim=-1: torch.linalg.cross(x, y, dim=dim), "CompositeExplicitAutograd")
UNKNOWN = torch.ops.nameless.cross.default
SOFTMAX = call(aten._softmax.default, meta(5, 12), 1, False)
CHUNK = call(aten.split.Tensor, meta(5, 12), 6, 1)


@pytest.mark.parametrize(
    ("made", "placements", "outputs"),
    [
        (MM, (Shard(0), R), [Shard(0)]),
        (MM, (R, Shard(1)), [Shard(1)]),
        (MM, (Shard(1), Shard(0)), [P]),
        (MM, (P, R), [P]),
        (MM, (R, P), [P]),
        (MM, (ZigZag(0), R), [ZigZag(0)]),
        (MM, (Ragged((3, 1), (1,)), Ragged((3, 1), (0,))), [P]),
        (ADD, (P, P), [P]),
        (ADD, (P, R), [P]),
        (ADD, (Shard(1), R), [Shard(1)]),
        (ADD, (Owner(1), Owner(1)), [Owner(1)]),
        (ADD, (Ragged((1, 3), (0, 1)), R), [Ragged((1, 3), (0, 1))]),
        (MUL, (P, R), [P]),
        (EXP, (BlockCyclic(0, 2),), [BlockCyclic(0, 2)]),
        (EXP, (Partial("max"),), [Partial("max")]),
        (SUM, (Shard(0),), [P]),
        (SUM, (Shard(1),), [Shard(0)]),
        (SUM, (P,), [P]),
        (MERGE, (Shard(0),), [Shard(0)]),
        (MERGE, (Shard(1),), [Interleaved(0, 4)]),
        (MERGE_UNEVEN, (Shard(0),), [Ragged((2, 1), (0,))]),
        (SPLIT, (Shard(1),), [Shard(1)]),
        (SPLIT, (Interleaved(1, 4),), [Shard(2)]),
        (CHUNK, (Interleaved(1, 2),), [Shard(1), Shard(1)]),
        (SOFTMAX, (Owner(1),), [Owner(1)]),
        (MM, (Owner(0), R), [Owner(0)]),
    ],
    ids=str,
)
def test_free_of_communication(made, placements, outputs) -> None:
    """These layouts need no redistribution; the results are placed as the equation says."""
    decision = decide(made, TP, *placements)
    assert decision.cost_bytes == 0
    assert [layout.placements[0] for layout in decision.outputs] == outputs
    for layout, placement in zip(decision.inputs, placements, strict=True):
        assert layout.placements[0] in {placement, P, Shard(0), Shard(1)} or placement == R
        assert layout.placements[0] == placement or placement == R


@pytest.mark.parametrize(
    ("made", "placements", "inputs"),
    [
        (EXP, (P,), "one reduce-scatter"),
        (MUL, (P, P), "one of them, or both scattered"),
        (MM, (Shard(0), Shard(1)), "the smaller one"),
        (call(aten._softmax.default, meta(8, 6), -1, False), (Shard(1),), "to the other dim"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_equation_is_moved_by_the_cheapest_way(made, placements, inputs) -> None:
    decision = decide(made, TP, *placements)
    assert decision.cost_bytes > 0
    assert not decision.fallback


def test_the_smaller_operand_moves() -> None:
    """m is worth keeping cut when the other factor is small, n when it is large."""
    wide = call(aten.mm.default, meta(1024, 8), meta(8, 8))
    assert decide(wide, TP, Shard(0), Shard(1)).outputs[0].placements == (Shard(0),)
    tall = call(aten.mm.default, meta(8, 8), meta(8, 1024))
    assert decide(tall, TP, Shard(0), Shard(1)).outputs[0].placements == (Shard(1),)


def test_each_axis_has_its_own_rule() -> None:
    decision = decide(MM, DT, (Shard(0), Shard(1)), (R, Shard(0)))
    assert shown(decision) == "[8@dp, 6@tp], [6@tp, 4] -> [8@dp, 4] {tp: Partial(sum)}"
    assert "dp: cut m" in decision.reason
    assert "tp: cut k" in decision.reason


def test_the_order_of_application_is_kept() -> None:
    on = mesh(dp=2, tp=2)
    decision = decide(call(aten.exp.default, meta(5, 4)), on, (Shard(0), Shard(0)), order=("tp", "dp"))
    assert decision.outputs[0].order_names == ("tp", "dp")
    assert decision.cost_bytes == 0


def test_nothing_is_cut_when_everything_is_whole() -> None:
    assert decide(MM, DT, (R, R), (R, R)).outputs[0].placements == (R, R)


def test_combinations_are_priced_together() -> None:
    """Axis by axis the greedy choice sends four times more: what one axis cuts, the other need not move."""
    made = call(aten.mm.default, meta(1024, 64), meta(64, 64))
    on = mesh(a=8, b=8)
    decision = decide(made, on, (R, R), (Shard(1), Shard(1)))
    assert decision.cost_bytes == 0
    assert decision.outputs[0].placements == (Shard(1), Shard(1))


def test_a_mutated_operand_stays_where_it_is() -> None:
    made = call(aten.add_.Tensor, meta(8, 6), meta(8, 6))
    finished = decide(made, TP, R, P)
    assert [layout.placements[0] for layout in finished.inputs] == [R, R]
    assert finished.rewrites == ()
    assert decide(made, TP, Shard(0), P).inputs[1].placements == (Shard(0),)
    assert decide(made, TP, P, R).inputs[1].placements == (P,)


def test_a_mutated_operand_that_cannot_stay_is_named() -> None:
    decision = decide(call(aten.exp_.default, meta(8, 6)), TP, P)
    assert decision.rewrites == (0,)
    assert "self is written but cannot keep its layout" in decision.reason


def test_an_out_operand_gets_the_results_layout() -> None:
    made = call(aten.add.out, meta(8, 6), meta(8, 6), out=meta(8, 6))
    decision = decide(made, TP, Shard(0), R, Shard(0))
    assert [layout.placements[0] for layout in decision.inputs] == [Shard(0)] * 3
    assert decision.outputs[0] is decision.inputs[2]


def test_an_op_without_a_rule_makes_everything_whole_and_says_so() -> None:
    decision = decide(call(UNKNOWN, meta(8, 3), meta(8, 3)), TP, Shard(0), Shard(0))
    assert decision.fallback
    assert "no rule" in decision.reason
    assert all(layout.is_fully_replicated for layout in (*decision.inputs, *decision.outputs))


def test_only_metadata_is_read_by_factories() -> None:
    made = call(aten.ones_like.default, meta(8, 6))
    assert decide(made, TP, P).outputs[0].placements == (R,)
    assert decide(made, TP, P).inputs[0].placements == (P,)
    other = call(aten.new_zeros.default, meta(8, 6), [3])
    assert decide(other, TP, Shard(0)).inputs[0].placements == (Shard(0),)
    assert decide(other, TP, Shard(0)).outputs[0].placements == (R,)


def test_local_arguments_follow_the_coords() -> None:
    decision = decide(MERGE_UNEVEN, TP, Shard(0))
    assert decision.local_args((0,)) == {"size": [8, 8]}
    assert decision.local_args((1,)) == {"size": [4, 8]}
    parts = decide(CHUNK, TP, Interleaved(1, 2))
    assert parts.local_args((1,)) == {"split_size": 3}
    assert decide(EXP, TP, Shard(0)).local_args((0,)) == {}


def test_any_is_not_a_sum_of_bools() -> None:
    made = call(aten.any.default, meta(8, 6))
    assert decide(made, TP, Shard(0)).outputs[0].placements == (Partial("max"),)
    assert decide(made, TP, P).inputs[0].placements[0].is_pending is False


@pytest.mark.parametrize(
    ("name", "source", "target", "kept"),
    [
        ("sum", torch.float32, torch.float64, False),  # one device rounds the sum, not its terms
        ("sum", torch.bfloat16, torch.float32, False),
        ("sum", torch.float32, torch.bfloat16, False),
        ("sum", torch.uint8, torch.int64, False),  # one device wraps around
        ("sum", torch.int64, torch.uint8, True),  # modulo 2^64, then modulo 2^8
        ("sum", torch.uint8, torch.int8, True),
        ("sum", torch.int32, torch.float32, False),
        ("sum", torch.float32, torch.complex64, True),
        ("avg", torch.bfloat16, torch.float32, False),
        ("product", torch.int32, torch.int8, True),
        ("product", torch.int8, torch.int32, False),
        ("max", torch.bfloat16, torch.float32, True),
        ("max", torch.float32, torch.bfloat16, True),
        ("max", torch.uint8, torch.int32, True),
        ("max", torch.int32, torch.uint8, False),
        ("max", torch.float32, torch.int32, False),
        ("min", torch.bool, torch.float32, True),
        ("min", torch.float32, torch.bool, False),
        ("bor", torch.uint8, torch.int32, True),
        ("norm2", torch.float32, torch.float64, False),
    ],
)
def test_a_cast_converts_terms_only_where_it_converts_their_reduction(name, source, target, kept) -> None:
    """`to(combine(parts)) == combine(to(parts))`, bit for bit."""
    pending = Partial(name)
    made = call(aten._to_copy.default, meta(8, 6, dtype=source), dtype=target)
    decision = decide(made, TP, pending)
    assert decision.inputs[0].placements == ((pending,) if kept else (R,))
    assert decision.outputs[0].placements == decision.inputs[0].placements


def test_a_number_makes_a_sum_affine() -> None:
    """Every coord would add the number: the pending sum has to be finished first."""
    decision = decide(call(aten.add.Tensor, meta(8, 6), 1.0), TP, P)
    assert not decision.inputs[0].placements[0].is_pending
    assert decide(call(aten.mul.Tensor, meta(8, 6), 2.0), TP, P).outputs[0].placements == (P,)


def test_lists_are_decided_element_by_element() -> None:
    made = call(aten._foreach_mul.List, [meta(8, 6), meta(4)], [meta(8, 6), meta(4)])
    decision = decide(made, TP, Shard(0), R, Shard(0), R)
    assert [layout.placements[0] for layout in decision.outputs] == [Shard(0), R]
    assert decision.runs_empty


def test_the_layouts_of_a_call_must_fit() -> None:
    with pytest.raises(RuleError, match="2 operands, 1 layouts"):
        propagate(ADD, [Layout(TP, (R,), (8, 6), dtype=torch.float32)])
    left = Layout(TP, (R,), (8, 6), dtype=torch.float32)
    right = Layout(mesh(dp=2), (R,), (8, 6), dtype=torch.float32)
    with pytest.raises(RuleError, match="different meshes"):
        propagate(ADD, [left, right])


def test_a_rule_that_is_added_takes_effect_and_can_be_taken_back() -> None:
    made = call(UNKNOWN, meta(8, 3), meta(8, 3))
    before = registry_module.registry.generation
    entry = rule("nameless::cross", "...[dim:_], ...[dim:_] -> ...[dim:_]")
    try:
        assert registry_module.registry.generation > before
        assert entry in rules_of("nameless::cross")
        decision = decide(made, TP, Shard(0), Shard(0))
        assert decision.outputs[0].placements == (Shard(0),)
    finally:
        remove_rule(entry)
    assert decide(made, TP, Shard(0), Shard(0)).fallback


def test_ops_are_named_by_qualified_names_or_overloads() -> None:
    with pytest.raises(RuleError, match="names no op"):
        rule("linalg_cross", "... -> ...")
    with pytest.raises(RuleError, match="name at least one op"):
        register_rule()
    assert rules_of(aten.add_.Tensor) == rules_of("aten::add")
    assert rules_of(aten._foreach_add.List) == rules_of("aten::add")


def test_a_rule_that_does_not_fit_falls_back_and_says_why() -> None:
    entry = rule("nameless::cross", "a b c, a b c -> a b c")
    try:
        decision = decide(call(UNKNOWN, meta(8, 3), meta(8, 3)), TP, Shard(0), Shard(0))
    finally:
        remove_rule(entry)
    assert decision.fallback
    assert "self has 2 dims, its pattern 3" in decision.reason


@pytest.mark.parametrize(
    ("placement", "dtype", "value"),
    [
        (P, torch.float32, 0.0),
        (Partial("max"), torch.float32, float("-inf")),
        (Partial("max"), torch.bool, False),
        (Partial("min"), torch.int64, torch.iinfo(torch.int64).max),
        (Partial("product"), torch.float32, 1.0),
    ],
)
def test_the_identity_of_a_reduction(placement, dtype, value) -> None:
    assert identity_of(placement, dtype) == value


def test_only_pure_decompositions_stand_in_for_a_rule() -> None:
    """Not those that draw, write, or make index tensors: replicating the op is right, they would raise."""
    assert registry_module.fallback_decomposition(aten.dist.default) is not None
    for op in (aten.normal.Tensor_Tensor, aten.renorm_.default, aten.grid_sampler_2d.default):
        assert registry_module.fallback_decomposition(op) is None

"""Every shipped rule is true: checked on simulated ranks, on samples of our own and of torch's database."""

from __future__ import annotations

import pytest
import torch

from shardwright.placement.base import Replicate
from shardwright.placement.partial import Partial
from shardwright.placement.shard import Shard
from shardwright.rules import rules_of
from shardwright.testing.check_rule import check_rule
from shardwright.testing.simulate import Sample, in_double
from tests.rules.calls import call, decide, mesh, meta
from tests.rules.samples import SAMPLES, samples_of


@pytest.mark.parametrize("op", SAMPLES, ids=lambda op: op.name())
def test_the_rules_of_a_transformer_are_true(op: torch._ops.OpOverload) -> None:
    """`map(op, in(x)) == out(op(x))` for even, uneven, empty and scattered cuts, in two profiles of sizes."""
    report = check_rule(op, samples_of(op), worlds=(2,))
    assert report.cut > 0
    assert report.without_formula == 0


@pytest.mark.slow
@pytest.mark.parametrize("op", SAMPLES, ids=lambda op: op.name())
def test_the_rules_of_a_transformer_are_true_in_three_parts_too(op: torch._ops.OpOverload) -> None:
    """The same, and on three ranks, where more is uneven and empty."""
    report = check_rule(op, samples_of(op), worlds=(2, 3))
    assert report.cut > 0
    assert report.without_formula == 0


def test_every_rule_prints_its_equation() -> None:
    assert [str(entry) for entry in rules_of("aten::mm")] == [
        "aten::mm: m k, k n -> m n; reduce=sum; hom self: sum->sum; hom mat2: sum->sum"
    ]


def test_the_grouped_product_cuts_columns_and_the_contracted_dim() -> None:
    """Its kernel wants rows of whole 16 bytes, so only such cuts are tried."""
    op = torch.ops.aten._grouped_mm.default
    offsets = torch.tensor([3, 8], dtype=torch.int32)
    x, weight = torch.randn(8, 16), torch.randn(2, 16, 24)
    whole = op(x, weight, offsets)
    columns = [op(x, part.contiguous(), offsets) for part in weight.chunk(2, 2)]
    torch.testing.assert_close(torch.cat(columns, 1), whole)
    pairs = zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)
    terms = [op(left.contiguous(), right.contiguous(), offsets) for left, right in pairs]
    torch.testing.assert_close(terms[0] + terms[1], whole)
    tp = mesh(tp=2)
    half = torch.bfloat16
    made = call(op, meta(8, 16, dtype=half), meta(2, 16, 24, dtype=half), meta(2, dtype=torch.int32))
    assert decide(made, tp, Replicate(), Shard(2), Replicate()).outputs[0].placements == (Shard(1),)
    assert decide(made, tp, Shard(1), Shard(1), Replicate()).outputs[0].placements == (Partial("sum"),)


def test_a_sample_in_double_says_so_in_its_arguments() -> None:
    """An op that is told its operands' dtype (an accumulator's, say) is told the wider one."""
    x, index = torch.ones(2), torch.ones(2, dtype=torch.int64)
    named = {"acc_dtype": torch.float32, "to": torch.int64}
    wide = in_double(Sample((x, torch.float32, [index, torch.float16]), named))
    assert wide.args[0].dtype == wide.args[1] == wide.kwargs["acc_dtype"] == torch.float64
    assert (wide.args[2][0].dtype, wide.args[2][1]) == (torch.int64, torch.float16)
    assert wide.kwargs["to"] == torch.int64

"""Attention in which queries share heads of keys: cut by whole groups, or between any heads of queries."""

from __future__ import annotations

import pytest
import torch

from shardwright.placement.base import Replicate
from shardwright.placement.partial import Partial
from shardwright.placement.ragged import Ragged
from shardwright.placement.shard import Shard
from shardwright.rules.catalog import attention
from shardwright.testing.check_rule import check_rule
from shardwright.testing.simulate import RuleCheckError, Sample
from tests.rules.calls import call, decide, mesh, meta

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
HEADS = ((4, 2), (6, 2), (6, 3), (5, 1))


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def _forward(heads: int, shared: int, *, causal: bool, mask: bool = False) -> Sample:
    args = (_randn(2, heads, 5, 3), _randn(2, shared, 5, 3), _randn(2, shared, 5, 3) + 1, 0.0, causal)
    return Sample(args, {"attn_mask": _randn(2, heads, 5, 5)} if mask else {})


def _backward(heads: int, shared: int, *, causal: bool, mask: bool = False) -> Sample:
    sample = _forward(heads, shared, causal=causal, mask=mask)
    out, log_sum = FORWARD(*sample.args, **sample.kwargs)
    return Sample((_randn(2, heads, 5, 3), *sample.args[:3], out, log_sum, 0.0, causal), sample.kwargs)


@pytest.mark.parametrize(("op", "sample"), [(FORWARD, _forward), (BACKWARD, _backward)])
def test_the_rules_are_true_of_grouped_heads(op, sample):
    """`map(op, in(x)) == out(op(x))` for heads that an axis divides, and that it does not."""
    samples = [sample(*heads, causal=causal) for heads in HEADS[1:3] for causal in (False, True)]
    report = check_rule(op, [*samples, sample(4, 2, causal=False, mask=True)], worlds=(3,))
    assert report.cut > 0
    assert report.without_formula == 0


@pytest.mark.slow
@pytest.mark.parametrize(("op", "sample"), [(FORWARD, _forward), (BACKWARD, _backward)])
def test_the_rules_are_true_of_more_grouped_heads(op, sample):
    samples = [
        sample(*heads, causal=causal, mask=mask)
        for heads in HEADS for causal in (False, True) for mask in (False, True) if not (causal and mask)
    ]  # fmt: skip
    assert check_rule(op, samples, worlds=(2, 3, 5)).cut > 0


@pytest.mark.parametrize("queries", [Shard(1), Ragged((2, 1, 1, 0), (1,))])
def test_queries_cut_between_any_heads_send_nothing_beside_whole_keys(queries):
    shared = meta(3, 2, 7, 4), meta(3, 2, 7, 4)
    made = call(FORWARD, meta(3, 4, 7, 4), *shared, is_causal=True)
    decision = decide(made, mesh(tp=4), queries, Replicate(), Replicate())
    assert decision.cost_bytes == 0
    assert decision.outputs[0].placements == (queries,)


def test_the_gradients_of_shared_keys_are_terms():
    large, small, rows = meta(3, 4, 7, 4), meta(3, 2, 7, 4), meta(3, 4, 7)
    made = call(BACKWARD, large, large, small, small, large, rows, 0.0, True)
    cut, whole = Shard(1), Replicate()
    decision = decide(made, mesh(tp=4), cut, cut, whole, whole, cut, cut)
    assert decision.cost_bytes == 0
    assert [x.placements for x in decision.outputs] == [(cut,), (Partial("sum"),), (Partial("sum"),)]


def test_the_keys_of_other_queries_go_red(monkeypatch):
    """A fault: every rank takes the first heads of keys."""
    first = lambda held, key: torch.zeros(held.length, dtype=torch.int64)  # noqa: E731 - of two arguments
    monkeypatch.setattr(attention, "_shared_heads", first)
    with pytest.raises(RuleCheckError):
        check_rule(FORWARD, [_forward(4, 2, causal=False)], worlds=(2,))

"""In-place and `out=` forms of ops that have a rule, or steps, only in the form that writes nothing."""

from __future__ import annotations

import pytest
import torch

import shardwright as sw
from shardwright.rules.op import functional_form
from tests.tensor.cases import full, mesh, place, whole

aten = torch.ops.aten


def test_the_form_that_writes_nothing_is_found_by_its_arguments():
    assert functional_form(aten.renorm_.default) is aten.renorm.default
    assert functional_form(aten.isin.Tensor_Tensor_out) is aten.isin.Tensor_Tensor
    assert functional_form(aten.linspace.Tensor_Tensor_out) is aten.linspace.Tensor_Tensor
    assert functional_form(aten.renorm.default) is None
    assert functional_form(aten.__and__.Tensor) is None


def _cut(x):
    return place(x, [sw.Shard(0)] * mesh().ndim)


def _written():
    x, some = full(6, 5), torch.tensor([1, 2])
    with sw.trace() as trace:
        scaled = _cut(x).clone()
        assert scaled.renorm_(2, 1, 0.5) is scaled
        torch.testing.assert_close(whole(scaled), x.clone().renorm_(2, 1, 0.5))
        found = _cut(torch.zeros(7, dtype=torch.bool))
        assert torch.isin(_cut(torch.arange(7)), place(some, [sw.Replicate()]), out=found) is found
        assert whole(found).tolist() == torch.isin(torch.arange(7), some).tolist()
        parts = [_cut(torch.zeros(5)) for _ in range(6)]
        torch.unbind_copy(_cut(x), out=parts)
        torch.testing.assert_close(torch.stack([whole(part) for part in parts]), x)
    assert not [d for d in trace.decisions if d.reason.startswith("fallback")]


def test_what_is_written_is_computed_by_rules(ranks):
    """No operand is made whole because the form that writes has no rule of its own."""
    ranks(2, _written)


def _by_algorithm():
    """Ops that reduce over the cut dim in steps, with arguments that go by name only."""
    x = full(7, 6)
    cut = place(x, [sw.Shard(0)] * mesh().ndim)
    low, high = (place(torch.zeros(1, 6), [sw.Replicate()] * mesh().ndim) for _ in range(2))
    torch.aminmax(cut, dim=0, keepdim=True, out=(low, high))
    for found, wanted in zip((low, high), torch.aminmax(x, dim=0, keepdim=True), strict=True):
        assert torch.equal(whole(found), wanted)
    sums = place(torch.zeros(7, 6, dtype=torch.float64), [sw.Shard(0)] * mesh().ndim)
    torch.cumsum(cut, 0, dtype=torch.float64, out=sums)
    torch.testing.assert_close(whole(sums), torch.cumsum(x, 0, dtype=torch.float64))


def test_a_form_that_writes_keeps_what_goes_by_name(ranks):
    """`dim=`, `keepdim=` and `dtype=` reach the steps of the form that writes nothing."""
    ranks(2, _by_algorithm)


def _into_an_operand():
    """What is written element by element resizes `out`, but none that it reads."""
    small, large = full(1, 2, 1), full(1, 2, 3, seed=1)
    for function in (torch.sub, torch.maximum, torch.true_divide, torch.lt):
        for placement in (sw.Replicate(), sw.Shard(1)):
            x, y = (place(v, [placement]) for v in (small, large))
            with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
                function(x, y, out=x)
            with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
                function(y, x, out=x)
            torch.testing.assert_close(whole(x), small, rtol=0, atol=0)
            other = x.new_empty(0)
            wanted = function(small, large, out=torch.empty(0))
            torch.testing.assert_close(whole(function(x, y, out=other)), wanted)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_an_operand_is_not_resized_to_be_written(ranks):
    ranks(2, _into_an_operand)

"""Facts about pending values hold in every form of their op: a stated sample, and planted wrong ones.

The sample is a few calls of our own and every sixtieth operator of torch's database, one call per overload.
`python -m tests.rules` takes all of them.
"""

from __future__ import annotations

import pytest
import torch

from shardwright.rules import rule
from shardwright.rules.rule import remove_rule
from shardwright.tensor.dispatch.ways import lists
from shardwright.testing.simulate import Sample
from tests.rules.catalog import calls
from tests.rules.forms import FORMS, Tried, check_forms, has_facts, smallest
from tests.rules.samples import samples_of
from tests.torch_samples import op_db

aten = torch.ops.aten
_X = torch.arange(-4.0, 4.0).view(2, 4) + 0.25
_OWN = {op: [Sample(samples_of(op)[0])] for op in (aten.mul.Tensor, aten.mm.default, aten.where.self)}
_EVERY = 60
_TOGETHER = 15
_INTEGERS = torch.arange(-4, 4).view(2, 4)


@pytest.mark.parametrize(
    ("infos", "facts"),
    [([], 10), pytest.param(op_db[::_EVERY], 50, marks=pytest.mark.slow)],
    ids=["our calls", "torch's database"],
)
def test_facts_are_true_in_every_form(ranks, infos, facts):
    found = {**calls(infos, samples=1, own=False), **_OWN}
    chosen = [(op.name(), s) for op, taken in found.items() if has_facts(op) for s in smallest(taken, 1)]
    chosen += [
        (op.name(), Sample((x,))) for op in (aten.neg.default, aten.relu.default) for x in (_X, _INTEGERS)
    ]
    chosen += [
        (op.name(), Sample((x, x))) for op in (aten.add.Tensor, aten.sub.Tensor) for x in (_X, _INTEGERS)
    ]
    tried = Tried()
    for start in range(0, len(chosen), _TOGETHER):
        one, other = ranks(2, check_forms, chosen[start : start + _TOGETHER])
        assert one.forms == other.forms
        tried += one
    assert not tried.wrong, "\n".join(tried.wrong)
    assert set(tried.forms) == set(FORMS)
    assert len(tried.facts) > facts


def _red(op, sample) -> set[str]:
    """The forms that differ from one device."""
    return {
        text.removeprefix(f"{op.name()} ").partition(",")[0]
        for text in check_forms([(op.name(), sample)]).wrong
    }


def _planted(name, fact):
    wrong = rule(name, "*... -> ...", hom=fact, elementwise=True)
    try:
        return _red(aten.neg.default, Sample((_X,)))
    finally:
        remove_rule(wrong)


_WRITING = {"in place", "list in place", "through a view"}


@pytest.mark.parametrize(
    ("name", "fact", "forms"),
    [
        ("aten::neg_", "self: max->max", _WRITING),
        ("aten::neg_", "self: sum->max", _WRITING),
        ("aten::neg.out", "self: max->max", {"out= of terms"}),
        ("aten::neg.default", "self: max->max", _WRITING | {"plain", "method", "list"}),
    ],
)
def test_a_fact_that_is_wrong_in_one_form_goes_red_there(ranks, name, fact, forms):
    assert ranks(2, _planted, name, fact) == [forms, forms]


def _lists_that_do_not_ask():
    """As if every position were one local call, whatever its rules say."""
    kept = lists._is_local
    lists._is_local = lambda *_: True
    lists._known.clear()
    try:
        return _red(aten.neg.default, Sample((_X,)))
    finally:
        lists._is_local = kept
        lists._known.clear()


def test_lists_that_do_not_ask_the_rules_go_red(ranks):
    assert ranks(2, _lists_that_do_not_ask) == [{"list in place"}] * 2

"""A pipeline with others; `python -m tests.compositions.pipelines_sweep` tries all of them."""

import pytest

from tests.compositions.pipelines import PAIRS, QUADRUPLES, TRIPLES, VARIANTS, case_of
from tests.pipeline.ranks import assert_right, beside_one_device
from tests.tiers import only

SETS = (*PAIRS, *TRIPLES, *QUADRUPLES)


@pytest.mark.parametrize("number", only([SETS.index(("pipeline", "hsdp"))], range(len(SETS))))
def test_steps_are_those_of_one_device(ranks, number):
    case = case_of(SETS[number], VARIANTS[number % len(VARIANTS)])
    assert_right(ranks(case.world, beside_one_device, case, timeout=240))


def test_there_are_pairs_five_triples_and_two_quadruples_on_at_most_eight_ranks():
    assert len(PAIRS) >= 5
    assert len({frozenset(s) for s in TRIPLES}) >= 5
    assert len({frozenset(s) for s in QUADRUPLES}) >= 2
    assert max(case_of(s, VARIANTS[0]).world for s in SETS) <= 8

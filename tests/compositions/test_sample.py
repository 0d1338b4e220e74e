"""A sample of the compositions, and every planted fault; `make compositions` runs them all."""

import pytest

from tests.compositions import faults
from tests.compositions.cases import VARIANTS, Case, cases
from tests.compositions.page import PAGE, written
from tests.compositions.report import sets_of
from tests.compositions.sweep import BAD, WRONG, attempt
from tests.compositions.table import composition
from tests.tiers import one_in

# On at most four ranks; each strategy alone, every pair and some triples.
SAMPLE = [
    ("decoder", composition("tensor tp", tp=2), "everything"),
    ("decoder", composition("styles tp", tp=2), "reentrant"),
    ("decoder", composition("tensor tp, replicate dp", dp=2, tp=2), "everything"),
    ("decoder", composition("tensor tp, replicate dp", tp=2, dp=2), "idle"),
    ("decoder", composition("styles tp, replicate dp", dp=2, tp=2), "no rows"),
    ("decoder", composition("blocks tp, fsdp dp", dp=2, tp=2), "everything"),
    ("decoder", composition("tensor tp, fsdp* dp", dp=2, tp=2), "two backwards"),
    ("decoder", composition("styles tp, hsdp dr ds", dr=1, ds=2, tp=2), "tied"),
    ("decoder", composition("replicate cr, fsdp ds", ds=2, cr=2), "no rows"),
    ("decoder", composition("fsdp* dp", dp=2), "twice"),  # refused: two units would own one parameter
    ("decoder", composition("replicate cr, hsdp dr ds", dr=2, ds=2, cr=1), "frozen"),
    ("decoder with experts", composition("expert, replicate dp", spread=2, dp=2), "everything"),
    ("decoder with experts", composition("expert, fsdp dp", spread=2, dp=4), "no rows"),
    ("decoder with experts", composition("expert, hsdp dr ds", spread=2, dr=2, ds=2), "frozen"),
    ("decoder with experts", composition("styles tp, expert, fsdp dp", spread=2, dp=2, tp=2), "tied"),
    ("stack of experts", composition("expert", spread=2, dp=4), "no rows"),
    ("llama", composition("tensor tp, replicate dp", dp=2, tp=2), "uneven"),
    ("qwen3", composition("styles tp, fsdp dp", dp=2, tp=2), "checkpointing"),
    ("arithmetic", composition("replicate dp", dp=2), "idle"),
    ("gpt2", composition("tensor tp", tp=2), "tied"),
    ("mixtral of our layers", composition("expert, fsdp dp", spread=2, dp=2), "uneven"),
    ("t5", composition("replicate cr, fsdp ds", ds=2, cr=2), "twice"),
    ("llama", composition("words tp, replicate dp", dp=2, tp=2), "everything"),
    ("qwen3", composition("stream tp, fsdp* dp", dp=2, tp=2), "reentrant"),
]
CASES = [Case(model, placed, VARIANTS[variant]) for model, placed, variant in SAMPLE]


@pytest.mark.parametrize("case", one_in(6, CASES), ids=str)
def test_every_gradient_loss_norm_and_parameter_is_that_of_one_device(rank_pool, case):
    record = attempt(rank_pool, case)
    assert record.verdict not in BAD, record.text


ERASED = [
    Case("llama", composition("tensor tp", tp=2), VARIANTS["plain"]),
    Case("decoder", composition("tensor tp, replicate dp", dp=2, tp=2), VARIANTS["uneven"]),
    Case("gpt2", composition("replicate dp", dp=2), VARIANTS["double"]),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", ERASED, ids=str)
def test_erased_steps_are_those_of_one_device(rank_pool, case):
    record = attempt(rank_pool, case, erased=True)
    assert record.verdict not in BAD, record.text
    assert "replays" in record.text


FAULTS = {
    faults.doubled_on_one_rank: "gradients: ",
    faults.averaged: "gradients: ",
    faults.never_summed: "gradients: ",
    faults.stale_on_one_rank: "parameters after: ",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("text", ["replicate dp", "fsdp dp"])
def test_a_planted_fault_goes_red_and_is_named(rank_pool, fault, text):
    if fault is faults.never_summed and text == "fsdp dp":
        text = "replicate dr, fsdp dp"  # fully sharded gradients alone have no terms left
    mesh = {"dr": 2, "dp": 2} if "dr" in text else {"dp": 2}
    record = attempt(rank_pool, Case("decoder", composition(text, **mesh), VARIANTS["plain"]), fault)
    assert record.verdict == WRONG
    assert FAULTS[fault] in record.text
    assert ".weight by " in record.text or "gain by " in record.text


def test_the_manual_says_what_is_tried():
    text = PAGE.read_text()
    assert text == written(text), "run python -m tests.compositions.page"


def test_the_table_has_every_strategy_every_pair_and_eight_triples():
    found = sets_of(case.composition for case in cases())
    assert {len(s) for s in found} == {1, 2, 3}
    assert len([s for s in found if len(s) == 1]) == 5
    assert len([s for s in found if len(s) == 2]) == 10
    assert len([s for s in found if len(s) == 3]) >= 8

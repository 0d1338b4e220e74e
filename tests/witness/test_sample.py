"""The witness and `trace()` agree, call by call and byte by byte: a sample of `python -m tests.witness`."""

from __future__ import annotations

import pytest

from tests.tiers import only

from .programs import STRATEGIES, compiled, explicit, step, threads

_SAMPLE = ("torch's styles", "expert, replicate", "tensor, fsdp")


@pytest.mark.parametrize("strategy", _SAMPLE)
def test_the_witness_counts_what_the_trace_lists(ranks, strategy):
    world, _ = STRATEGIES[strategy]
    for rank, parts in enumerate(ranks(world, step, strategy, "AdamW, foreach")):
        for part, lines in parts.items():
            assert not _differing(lines), (rank, part)
        assert parts["first step"], "a step that sends nothing shows nothing"


def _differing(lines):
    return [line for line in lines if not line.agrees]


def test_what_threads_and_the_program_itself_send_is_listed(ranks):
    for lines in ranks(2, threads):
        assert not _differing(lines)
        assert {line.kind for line in lines} >= {"all_reduce", "all_to_all", "barrier", "send_recv"}


def test_nothing_is_sent_in_explicit_mode_but_what_is_written(ranks):
    for lines, kinds in ranks(2, explicit):
        assert not _differing(lines)
        assert kinds == ["all_to_all"], "the redistribution of uneven rows; the gradient stays to be summed"


@pytest.mark.parametrize("backend", only(["aot_eager"], ["aot_eager", "inductor"]))
def test_what_a_compiled_graph_sends_is_listed(ranks, backend):
    for first, second, reasons in ranks(2, compiled, backend):
        assert first
        assert second
        assert not _differing(first)
        assert not _differing(second)
        assert set(reasons) == {"a compiled graph"}

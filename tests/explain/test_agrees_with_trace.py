"""`sw.explain` says of an op what a trace of it lists: collectives, bytes, and whether a rule was missing."""

from __future__ import annotations

from .agreement import composite, sample


def test_explain_says_of_the_sweeps_sample_what_a_trace_lists(ranks):
    for said in ranks(2, sample, ["Shard(0)"], timeout=170):
        assert not said.differing
        assert said.compared > 60


def test_explain_says_of_ops_that_consist_of_others_what_a_trace_lists(ranks):
    for said in ranks(2, composite):
        assert not said.differing
        assert said.compared > 40
        assert not said.untold

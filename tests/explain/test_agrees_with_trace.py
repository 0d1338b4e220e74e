"""`sw.explain` says of an op what a trace of it lists: collectives, bytes, and whether a rule was missing."""

from __future__ import annotations

from .agreement import composite, sample

# What sends while it runs (scans, windows, attention over cut keys), what leaves its result pending, what is
# large enough to go between pairs of ranks.
SENDING = (
    "cumsum", "cumprod", "logcumsumexp", "nn.functional.conv2d", "nn.functional.scaled_dot_product_attention",
    "nn.functional.multilabel_margin_loss", "sort", "std", "grid_sampler_3d",
)  # fmt: skip


def test_explain_says_of_the_sweeps_sample_what_a_trace_lists(ranks):
    for said in ranks(2, sample, ["Shard(0)"], timeout=170):
        assert not said.differing
        assert said.compared > 60


def test_explain_says_of_ops_that_consist_of_others_what_a_trace_lists(ranks):
    for said in ranks(2, composite):
        assert not said.differing
        assert said.compared > 40
        assert not said.untold


def test_inside_explicit_all_that_sends_is_refused_and_nothing_else(ranks):
    for said in ranks(2, sample, ["Shard(0)", "Shard(-1)"], SENDING, timeout=170):
        assert not said.differing
        assert said.compared > len(SENDING)

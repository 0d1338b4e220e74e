"""When verify takes a difference for rounding, and when it does not."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from shardwright.train.data import load_corpus
from shardwright.train.reference_run import ReferenceRun
from shardwright.train.verify import Findings, Snapshot, Verifier
from tests.train.worlds import tiny, write_text

CPU = torch.device("cpu")


@pytest.fixture
def reference(tmp_path) -> ReferenceRun:
    write_text(tmp_path / "text")
    config = tiny(data=tmp_path / "text")
    return ReferenceRun(config, load_corpus(config.data, config.seq_len), "adamw", CPU)


def snapshot_of(run: ReferenceRun, step: int = 1) -> Snapshot:
    """What a right parallel run at these weights would show."""
    found = run.gradients(step)
    choices = [best(scores, run.config.top_k) for scores in found.scores]
    weights = {name: value.clone() for name, value in run.weights().items()}
    run.model.zero_grad()
    return Snapshot(step, weights, found.by_name, choices)


def best(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


def compared(reference: ReferenceRun, snapshot: Snapshot) -> Findings:
    findings = Findings()
    Verifier(findings, reference, "adamw").compare(snapshot)
    return findings


def moved(reference: ReferenceRun, by: float) -> ReferenceRun:
    other = ReferenceRun(reference.config, reference.corpus, "adamw", CPU)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=generator))
    return other


def test_equal_gradients_need_no_reason(reference):
    findings = compared(reference, snapshot_of(reference))
    assert (findings.broken, findings.reasons, findings.gradient, findings.parameter) == ([], [], 0.0, 0.0)


def test_gradients_of_weights_that_rounding_moved_are_right_at_those_weights(reference):
    findings = compared(reference, snapshot_of(moved(reference, 1e-5)))
    assert findings.broken == []
    assert findings.gradient > 1e-5
    assert 1e-6 < findings.parameter < 1e-4
    assert len(findings.reasons) == 1
    assert "rounding has moved weights by up to" in findings.reasons[0]


def test_weights_that_moved_further_than_rounding_break_the_bound(reference):
    findings = compared(reference, snapshot_of(moved(reference, 1e-3)))
    assert any("parameters differ by" in fact for fact in findings.broken)


def test_moved_weights_do_not_excuse_a_wrong_gradient(reference):
    snapshot = snapshot_of(moved(reference, 1e-5))
    snapshot.gradients["norm.weight"].mul_(1.001)
    findings = compared(reference, snapshot)
    assert findings.broken[0].startswith(
        "adamw, step 1: 1 of 23 gradients are off at the run's own weights: norm.weight by 0.001 of its "
        "largest element (bound 1e-05), 1.001 times the right one; routing decisions unlike one device's: "
    )


def test_a_routing_decision_that_was_no_tie_is_reported_with_its_gap(reference):
    snapshot = snapshot_of(reference)
    choices = [(layer + 1) % reference.config.experts for layer in snapshot.choices]
    gradients = reference.gradients_at(1, snapshot.weights, choices, torch.float32).by_name
    findings = compared(reference, dataclasses.replace(snapshot, choices=choices, gradients=gradients))
    assert any("routing differs where it is no tie: layer 0:" in fact for fact in findings.broken)


def test_a_routing_tie_may_be_decided_either_way(reference):
    """Two experts with equal router rows score alike: whichever is picked, the gradients follow."""
    _tie(reference)
    findings = compared(reference, _otherwise(reference))
    assert findings.broken == []
    assert "routing ties were decided otherwise" in findings.reasons[0]


def test_one_device_goes_on_from_where_a_tie_has_parted_the_runs(reference):
    run = moved(reference, 1e-6)
    _tie(reference)
    _tie(run)
    snapshot = _otherwise(run)
    assert compared(reference, snapshot).gradient <= 1e-5
    for name, parameter in run.model.named_parameters():
        parameter.grad = snapshot.gradients[name]
    for one in (run, reference):
        one.update(1)
    for name, weight in run.weights().items():
        torch.testing.assert_close(reference.weights()[name], weight, rtol=0, atol=1e-6)


def test_what_is_followed_counts_for_all_later_steps(reference):
    """So a small fault of each step is found as soon as where no tie parts the runs."""
    verifier = Verifier(Findings(), reference, "adamw")
    run = moved(reference, 0.0)
    _tie(reference)
    for step in (1, 2, 3):
        with torch.no_grad():
            run.model.norm.weight.add_(4e-5)
        _tie(run)
        verifier.compare(_otherwise(run))
        assert bool(verifier.findings.broken) == (step == 3), verifier.findings.broken
    assert re.fullmatch(r"adamw, after step 0: parameters differ by 0.00012.*", verifier.findings.broken[0])


def _tie(run: ReferenceRun) -> None:
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            if name.endswith("router.weight"):
                parameter[1] = parameter[0]


def _otherwise(run: ReferenceRun) -> Snapshot:
    """What a right run at these weights would show that decides ties of the last layer otherwise."""
    snapshot = snapshot_of(run)
    choices = [snapshot.choices[0], _swapped(snapshot.choices[1])]
    gradients = run.gradients_at(1, snapshot.weights, choices, torch.float32).by_name
    return dataclasses.replace(snapshot, choices=choices, gradients=gradients)


def _swapped(choices: torch.Tensor) -> torch.Tensor:
    """Expert 0 for expert 1 and the other way round, where a token has just one of them."""
    has = [(choices == expert).any(-1, keepdim=True) for expert in (0, 1)]
    return torch.where((has[0] != has[1]) & (choices < 2), 1 - choices, choices)


def test_a_gradient_that_is_not_a_number_breaks_the_bound(reference):
    snapshot = snapshot_of(reference)
    snapshot.gradients["norm.weight"][0] = float("nan")
    assert compared(reference, snapshot).broken


def test_a_gradient_that_is_zero_but_for_rounding_is_not_measured_by_itself(tmp_path):
    """With one expert per token its normed weight is one, whatever the router says."""
    write_text(tmp_path / "text")
    config = tiny(data=tmp_path / "text", top_k=1)
    reference = ReferenceRun(config, load_corpus(config.data, config.seq_len), "adamw", CPU)
    snapshot = snapshot_of(reference)
    router = snapshot.gradients["blocks.0.moe.router.weight"]
    assert router.abs().max() < 1e-6
    router.add_(1e-8)
    assert compared(reference, snapshot).broken == []
    router.add_(1e-3)
    assert compared(reference, snapshot).broken

"""metrics.jsonl holds each step once, whatever happened to the run that wrote it."""

from __future__ import annotations

import math

import pytest
import torch

from shardwright.train.metrics import MetricsFile, StepRecord, load_entropy, read_metrics
from shardwright.train.plot import draw_losses


def record(step: int, loss: float = 1.0) -> StepRecord:
    return StepRecord(step, loss, None if step % 2 else loss, 0.5, 1e-3, 2.0, 100.0, 10, 1.0)


def written(path, steps):
    file = MetricsFile.create(path)
    for step in steps:
        file.append(record(step))
    file.close()
    return path


def test_a_resumed_file_has_no_gaps_and_no_duplicates(tmp_path):
    path = written(tmp_path / "metrics.jsonl", range(1, 8))
    file = MetricsFile.resume_at(path, 4)
    file.append(record(5))
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4, 5]
    file.close()


def test_a_last_line_cut_short_is_dropped(tmp_path):
    path = written(tmp_path / "metrics.jsonl", range(1, 4))
    path.write_text(path.read_text() + '{"step": 4, "lo')
    MetricsFile.resume_at(path, 3).close()
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]


@pytest.mark.parametrize(("steps", "missing"), [([1, 3], 1), ([1, 2, 2, 3], 0), ([1, 2], 1), ([], 3)])
def test_a_file_that_lacks_steps_of_the_checkpoint_says_so_and_goes_on(tmp_path, steps, missing):
    path = written(tmp_path / "metrics.jsonl", steps)
    file = MetricsFile.resume_at(path, 3)
    file.append(record(4))
    file.close()
    assert file.missing == missing
    assert [line["step"] for line in read_metrics(path)] == [*sorted(set(steps)), 4]


FOREIGN = ['{"step": 2}', '{"step": 2, "loss": "x", "held_out_loss": null}']


@pytest.mark.parametrize("damage", [*FOREIGN, "{", "[1]", '{"step": "x"}', "[" * 100_000, "\x00\xff"])
def test_a_line_that_is_damaged_costs_this_line_only(tmp_path, damage):
    path = written(tmp_path / "metrics.jsonl", [1])
    path.write_text(path.read_text() + damage + "\n", encoding="latin-1")
    MetricsFile.resume_at(path, 2).close()
    assert [line["step"] for line in read_metrics(path)] == [1]


def test_a_loss_that_is_not_finite_stays_readable(tmp_path):
    file = MetricsFile.create(tmp_path / "metrics.jsonl")
    file.append(record(1, math.nan))
    file.close()
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["loss"] is None


def test_entropy_of_even_loads_is_the_logarithm_and_of_one_expert_zero():
    assert load_entropy(torch.full((2, 8), 5)) == pytest.approx(math.log(8))
    assert load_entropy(torch.tensor([[9, 0, 0]])) == pytest.approx(0.0)
    assert load_entropy(torch.zeros(1, 4)) == 0.0


@pytest.mark.processes  # matplotlib asks a program for the fonts of a machine that it has not seen
def test_the_loss_curve_is_a_png(tmp_path):
    file = MetricsFile.create(tmp_path / "metrics.jsonl")
    for step, loss in enumerate((2.0, 1.0, math.nan, math.nan), start=1):  # it has diverged
        file.append(record(step, loss))
    file.close()
    assert draw_losses(read_metrics(tmp_path / "metrics.jsonl"), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")

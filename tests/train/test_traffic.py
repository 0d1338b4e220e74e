"""The bytes that a step reports are those that its strategies send."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.train.metrics import read_metrics
from tests.train.test_loop import trained
from tests.train.worlds import tiny, write_text


@pytest.fixture
def settings(tmp_path) -> dict[str, Any]:
    write_text(tmp_path / "text")
    return {"data": tmp_path / "text", "out": tmp_path / "out", "steps": 2}


def bytes_of(settings: dict[str, Any]) -> int:
    return read_metrics(settings["out"] / "metrics.jsonl")[-1]["bytes_communicated"]


def parameter_bytes(part: str) -> int:
    from shardwright.train.model import Decoder, ModelShape

    model = Decoder(ModelShape.of(tiny()))
    return sum(
        4 * p.numel()
        for name, p in model.named_parameters()
        if (".moe.experts." in name) == (part == "experts")
    )


def test_one_device_sends_nothing(ranks, settings):
    ranks(1, trained, settings)
    assert bytes_of(settings) == 0


def test_replicas_send_their_gradients_once(ranks, settings):
    """An all-reduce over two ranks: each sends its gradients once; little else."""
    settings |= {"world": 2, "dp_replicate": 2}
    ranks(2, trained, settings)
    gradients = 2 * (parameter_bytes("dense") + parameter_bytes("experts"))
    assert gradients <= bytes_of(settings) <= 1.1 * gradients


ROUTERS = 2 * 4 * (2 * 4 * 16)  # gathered and scattered by nobody: they belong to the experts' mesh


def test_a_small_sharded_model_is_one_unit(ranks, settings):
    """All is gathered once and scattered once."""
    settings |= {"world": 2, "batch_size": 1, "seq_len": 4, "unit_mib": 1}
    ranks(2, trained, settings)
    least = 2 * parameter_bytes("dense") - ROUTERS
    assert least <= bytes_of(settings) - 2 * parameter_bytes("experts") <= 1.2 * least


def test_sharded_units_gather_parameters_and_scatter_gradients(ranks, settings):
    """Blocks are gathered twice, the root (embedding, norm, head) once; all is scattered once."""
    settings |= {"world": 2, "batch_size": 1, "seq_len": 4}
    ranks(2, trained, settings)
    dense, experts = parameter_bytes("dense"), parameter_bytes("experts")
    root = 4 * (2 * 256 * 16 + 16)
    least = dense + dense + (dense - root) - ROUTERS
    assert least <= bytes_of(settings) - 2 * experts <= 1.3 * least

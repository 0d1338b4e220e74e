"""A sample of `python -m tests.checkpoint.matrix`, which tries every ordered pair of fourteen worlds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.matrix.check import saved_by, wrong_after
from tests.checkpoint.matrix.worlds import WORLDS
from tests.tiers import only
from tests.train.worlds import write_text

Ranks = Callable[..., list[Any]]
PAIRS = [("fsdp, uneven", "placements of a user")]
MORE = [
    ("placements of a user", "tensor, fsdp, experts"),
    ("hsdp, experts", "placements on two axes"),
    ("placements on two axes", "fsdp, uneven"),
    ("tensor, hsdp, experts", "tensor, hsdp, experts"),
]


@pytest.mark.parametrize(("source", "target"), only(PAIRS, PAIRS + MORE))
def test_a_run_goes_on_on_another_mesh(ranks: Ranks, tmp_path: Path, source: str, target: str) -> None:
    """Bit for bit at the checkpoint, and five losses of the run that was not interrupted."""
    write_text(tmp_path / "text")
    saved = {source: saved_by(ranks, tmp_path, source, tmp_path / "text")}
    assert len(WORLDS) == 14
    assert wrong_after(ranks, saved, target, tmp_path / "text") == {source: ""}


def test_a_planted_difference_goes_red(ranks: Ranks, tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    path, told, losses = saved_by(ranks, tmp_path, "one device", tmp_path / "text")
    name = next(key for key in told if key.startswith("muon/"))
    other = {**told, name: torch.nextafter(told[name], torch.tensor(9.0))}
    later = [*losses[:-1], losses[-1] * 1.0005]
    saved = {"tensors": (path, other, losses), "losses": (path, told, later), "neither": (path, told, losses)}
    wrong = wrong_after(ranks, saved, "one device", tmp_path / "text")
    assert [bool(wrong[name]) for name in saved] == [True, True, False]

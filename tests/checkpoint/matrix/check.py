"""Pairs of worlds: what one saved another loads bit for bit, and goes on from as if nothing had been."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.checkpoint.matrix.worlds import WORLDS, Told, load_and_go_on, train_and_save
from tests.checkpoint.programs import same

# Sums in another order, and steps of AdamW and Muon upon them: relative to the loss.
NEAR = 1e-4
Saved = tuple[Path, Told, list[float]]


def saved_by(ranks: Any, folder: Path, source: str, data: Path) -> Saved:
    """A checkpoint of a world, what it holds, and the losses of the run that was not interrupted."""
    path = folder / source.replace(" ", "-").replace(",", "")
    told, losses = ranks(WORLDS[source].ranks, train_and_save, path, source, data)[0]
    return path, told, losses


def wrong_after(ranks: Any, saved: Mapping[str, Saved], target: str, data: Path) -> dict[str, str]:
    """By source, what is not as it should be in another world; empty: nothing.

    The losses are near those of the source; in the world of the source itself they are equal.
    """
    paths = [path for path, _, _ in saved.values()]
    by_rank = ranks(WORLDS[target].ranks, load_and_go_on, paths, target, data)
    return {
        source: next(filter(None, (_wrong(one[at], told, losses, near) for one in by_rank)), "")
        for at, (source, (_, told, losses)) in enumerate(saved.items())
        for near in [0.0 if source == target else NEAR]
    }


def _wrong(found: tuple[Told, list[float]], told: Told, losses: list[float], near: float) -> str:
    if not same(found[0], told):
        return "tensors differ"
    far = max(abs(a - b) / abs(b) for a, b in zip(found[1], losses, strict=True))
    return f"losses {found[1]} in place of {losses}" if not far <= near else ""

"""One pair of worlds: what one saved the other loads bit for bit, and goes on from as if nothing had been."""

from __future__ import annotations

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


def wrong_after(ranks: Any, saved: Saved, target: str, data: Path, *, exact: bool) -> str:
    """What is not as it should be in another world (or, `exact`, the same one); empty: nothing."""
    path, told, losses = saved
    for found, after in ranks(WORLDS[target].ranks, load_and_go_on, path, target, data):
        if not same(found, told):
            return "tensors differ"
        far = max(abs(a - b) / abs(b) for a, b in zip(after, losses, strict=True))
        if far > (0.0 if exact else NEAR):
            return f"losses {after} in place of {losses}"
    return ""

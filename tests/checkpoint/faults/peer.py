"""The same faults on torch's distributed checkpoint: what it loads without a word."""

from __future__ import annotations

import random
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.faults.damage import flip, model, optimizer


def flips(folder: Path, count: int, seed: int = 0) -> dict[str, int]:
    """How many flipped bits are refused, make no difference, or change what is loaded, silently."""
    warnings.simplefilter("ignore")
    made = model(1.0)
    tuned = optimizer(made)
    state = {f"m/{name}": one for name, one in made.state_dict().items()}
    for number, of in enumerate(tuned.state.values()):
        state |= {f"o/{number}/{name}": one for name, one in of.items()}
    dcp.save(state, checkpoint_id=folder / "good", no_dist=True)
    at, found = random.Random(seed), {"refused": 0, "right": 0, "silently wrong": 0}
    for _ in range(count):
        shutil.rmtree(folder / "bad", ignore_errors=True)
        shutil.copytree(folder / "good", folder / "bad")
        flip(folder / "bad", at)
        loaded = {name: torch.zeros_like(one) for name, one in state.items()}
        try:
            dcp.load(loaded, checkpoint_id=folder / "bad", no_dist=True)
        except BaseException:  # noqa: BLE001  whatever it is, it was not silent
            found["refused"] += 1
            continue
        same = all(torch.equal(loaded[name], one) for name, one in state.items())
        found["right" if same else "silently wrong"] += 1
    return found

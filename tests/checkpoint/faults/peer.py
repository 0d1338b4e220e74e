"""The same faults on torch's distributed checkpoint: what it loads without a word."""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.faults.damage import flip, model, optimizer
from tests.checkpoint.faults.inject import CHANGING, failing


def flips(folder: Path, count: int, seed: int = 0) -> dict[str, int]:
    """How many flipped bits are refused, make no difference, or change what is loaded, silently."""
    warnings.simplefilter("ignore")
    state = _state(1.0)
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


def _state(value: float) -> dict[str, torch.Tensor]:
    made = model(value)
    tuned = optimizer(made)
    state = {f"m/{name}": one for name, one in made.state_dict().items()}
    for number, of in enumerate(tuned.state.values()):
        state |= {f"o/{number}/{name}": one for name, one in of.items()}
    return state


def errors(folder: Path) -> dict[str, int]:
    """A disk error at each operation of a save over another: what then is there."""
    warnings.simplefilter("ignore")
    at, seen, found = 0, True, {"the old": 0, "the new": 0, "neither": 0}
    states = {"the old": _state(1.0), "the new": _state(2.0)}
    while seen:
        at += 1
        shutil.rmtree(folder, ignore_errors=True)
        dcp.save(states["the old"], checkpoint_id=folder, no_dist=True)
        names = (*CHANGING, "replace")
        with failing(folder, at, errno.EIO, names=names) as count, contextlib.suppress(BaseException):
            dcp.save(states["the new"], checkpoint_id=folder, no_dist=True)
        seen = bool(count.failed)
        loaded = {name: torch.zeros_like(one) for name, one in states["the old"].items()}
        with contextlib.suppress(BaseException):
            dcp.load(loaded, checkpoint_id=folder, no_dist=True)
        same = [
            what
            for what, state in states.items()
            if all(torch.equal(loaded[name], one) for name, one in state.items())
        ]
        found[same[0] if same else "neither"] += 1
    return found

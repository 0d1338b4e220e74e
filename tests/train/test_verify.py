"""Every accepted mesh trains like one device, and a fault planted in a strategy is found."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
from typing import Any
from unittest import mock

import pytest
import torch

from tests.tiers import only
from tests.train.worlds import tiny, write_text

MESHES = {
    "replicate": {"world": 2, "dp_replicate": 2},
    "fsdp": {"world": 2},
    "hsdp": {"world": 4, "dp_replicate": 2},
    "cp_replicate": {"world": 2, "cp_replicate": 2},
    "ep 2": {"world": 2, "dp_replicate": 2, "ep": 2},
    "ep 4": {"world": 4, "ep": 4},
    "hsdp + ep": {"world": 4, "dp_replicate": 2, "ep": 2},
    "tp 2": {"world": 2, "tp": 2},
    "tp + fsdp + ep": {"world": 4, "tp": 2, "ep": 2},
    "cp_replicate + fsdp": {"world": 4, "cp_replicate": 2, "ep": 2},
    "tp + replicate": {"world": 4, "tp": 2, "dp_replicate": 2},
    "three ranks": {"world": 3},
    "cp": {"world": 2, "cp": 2},
    "cp + cp_replicate + ep": {"world": 4, "cp": 2, "cp_replicate": 2, "ep": 4},
    "sp": {"world": 2, "tp": 2, "sp": True},
    "sp + cp + ep": {"world": 4, "tp": 2, "sp": True, "cp": 2, "ep": 2},
    "one device": {"world": 1},
    "one unit": {"world": 2, "unit_mib": 25},
    "one unit of copies + ep": {"world": 4, "dp_replicate": 2, "ep": 2, "unit_mib": 25},
}
# Their micro-batches are of one size.
STAGED = {
    "pp": {"world": 2, "pp": 2, "micro_batches": 4},
    "pp + replicate": {"world": 4, "pp": 2, "dp_replicate": 2},
    "pp + fsdp + ep": {"world": 4, "pp": 2, "dp_shard": 2, "ep": 2},
    "pp + hsdp + ep": {"world": 8, "pp": 2, "dp_replicate": 2, "ep": 2, "layers": 3, "batch_size": 8},
    "pp + one unit": {"world": 4, "pp": 2, "dp_shard": 2, "unit_mib": 25},
    "pp + tp": {"world": 4, "pp": 2, "tp": 2},
    "pp + cp + sp": {"world": 8, "pp": 2, "cp": 2, "tp": 2, "sp": True, "ep": 2},
    "pp alone of three": {"world": 3, "pp": 3, "layers": 5, "batch_size": 6},
}
BATCHES = {"even": 4, "uneven": 5, "fewer than ranks": 1}
# Each strategy alone, all of them at once, and each size of batch.
OFTEN = [
    ("replicate", "even"),
    ("cp_replicate", "uneven"),
    ("tp 2", "even"),
    ("sp + cp + ep", "fewer than ranks"),
]
LAST_LINE = re.compile(
    r"verify: max loss difference (\S+), max gradient difference (\S+), max parameter difference (\S+)"
)


def verified(settings: dict[str, Any], fault: str = "") -> tuple[int, str]:
    """Run `--verify` on this rank; the exit code and what it printed."""
    from shardwright.train.run_folder import RunFolder
    from shardwright.train.runner import degrees, verified_run

    config = tiny(verify=True, **settings)
    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(mock.patch.object(RunFolder, "draw"))  # a quarter of a second that proves nothing
        # The reference takes a thread for each rank that waits for it; here others compute beside it.
        stack.enter_context(mock.patch.object(os, "cpu_count", return_value=1))
        stack.enter_context(planted(fault))
        context = stack.enter_context(degrees(config).build(device="cpu"))
        code = verified_run(config, context)
    return code, printed.getvalue()


@contextlib.contextmanager
def planted(fault: str):
    """Spoil the gradients that a step has reduced, as a wrong strategy would."""
    from shardwright.train.step import Trainer

    right = Trainer._backward

    def wrong(self: Trainer, batch: torch.Tensor) -> torch.Tensor:
        loss = right(self, batch)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.grad.mul_(FAULTS[fault](name))
        return loss

    with mock.patch.object(Trainer, "_backward", wrong) if fault else contextlib.nullcontext():
        yield


FAULTS = {
    "all gradients twice as large": lambda name: 2.0,
    "experts twice as large": lambda name: 2.0 if ".experts." in name else 1.0,
    "one parameter twice as large": lambda name: 2.0 if name == "blocks.1.attention.wk.weight" else 1.0,
    "averaged instead of summed": lambda name: 0.5,
    "one norm a little too large": lambda name: 1.0001 if name == "norm.weight" else 1.0,
}


@pytest.fixture
def settings(tmp_path) -> dict[str, Any]:
    write_text(tmp_path / "text")
    return {"data": tmp_path / "text", "out": tmp_path / "out"}


@pytest.mark.parametrize(("mesh", "batch"), only(OFTEN, itertools.product(MESHES, BATCHES)))
def test_every_mesh_trains_like_one_device(ranks, settings, mesh, batch):
    """Loss and weights within 1e-4, gradients and their norm within 1e-5, under AdamW and SGD."""
    _trains_like_one_device(ranks, settings | {**MESHES[mesh], "batch_size": BATCHES[batch]})


@pytest.mark.parametrize("mesh", only(["pp", "pp + fsdp + ep"], STAGED))
def test_every_mesh_with_stages_trains_like_one_device(ranks, settings, mesh):
    _trains_like_one_device(ranks, settings | STAGED[mesh])


def _trains_like_one_device(ranks, settings):
    settings |= {"steps": 2}  # the second is of weights, moments and gradients that the first has left
    results = ranks(settings["world"], verified, settings)
    printed = results[0][1]
    assert [result[0] for result in results] == [0] * len(results), printed
    loss, gradient, parameter = (float(x) for x in LAST_LINE.fullmatch(printed.splitlines()[-1]).groups())
    assert loss <= 1e-4
    assert gradient <= 1e-5
    assert parameter <= 1e-4


def stopped(settings: dict[str, Any]) -> tuple[int, str]:
    """As `verified`, with a stop that is asked for in the third of its steps."""
    from shardwright.launch import supervise

    asked = iter([False, False, True])
    with mock.patch.object(supervise, "stop_requested", asked.__next__):
        return verified(settings)


def test_a_stop_ends_the_second_half_too(ranks, settings):
    ((code, printed),) = ranks(1, stopped, settings | {"world": 1, "steps": 2})
    assert code == 130
    *_, headline, last = printed.splitlines()
    assert headline == "verify: the same steps with plain SGD"
    assert last.startswith("step 1/2 ")


@pytest.mark.parametrize("mesh", [{"ep": 2}, {"pp": 2}], ids=["experts", "stages"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(ranks, settings, fault, mesh):
    settings |= {"world": 2, "steps": 1, "warmup": 1, **mesh}  # the first step tells of it
    results = ranks(2, verified, settings, fault)
    assert [code for code, _ in results] == [1, 1]
    printed = results[0][1]
    assert re.search(r"verify: BROKEN: adamw, step 1: \d+ of 23 gradients are off", printed)
    assert LAST_LINE.fullmatch(printed.splitlines()[-1])

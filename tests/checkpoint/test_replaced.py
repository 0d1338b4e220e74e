"""A load beside saves to the same path gives the checkpoint before or the one after."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright.checkpoint import contents, diff, latest, load, save, step_path, verify
from shardwright.checkpoint.loading import Loading
from shardwright.errors import CheckpointError

Ranks = Callable[..., list[Any]]


def model(value: float) -> nn.Module:
    made = nn.Module()
    made.weight = nn.Parameter(torch.full((3, 2), value))
    return made


def replace_before(step: str, path: Path, times: int) -> Callable[[], None]:
    """So often, all ranks save over the path before this step of a load; what undoes it."""
    real, done = getattr(Loading, step), 0

    def replaced(self: Loading, **given: Any) -> Any:
        nonlocal done
        if done < times:
            done += 1
            save(path, model(1.0 + done))
        return real(self, **given)

    setattr(Loading, step, replaced)
    return lambda: setattr(Loading, step, real)


def load_beside(path: Path, step: str, times: int) -> float:
    """The one value that is loaded; -1: nothing was."""
    save(path, model(1.0))
    fresh = model(0.0)
    undo = replace_before(step, path, times)
    try:
        load(path, fresh)
    except CheckpointError:
        assert not fresh.weight.any()
        return -1.0
    finally:
        undo()
    assert (fresh.weight == fresh.weight[0, 0]).all()
    dist.barrier()
    return fresh.weight[0, 0].item()


@pytest.mark.parametrize("step", ["_compare_others", "_read"])
def test_what_replaces_a_checkpoint_while_it_is_loaded_is_loaded(
    ranks: Ranks, tmp_path: Path, step: str
) -> None:
    assert ranks(2, load_beside, tmp_path / "c", step, 2) == [3.0, 3.0]


def test_a_path_that_never_rests_is_an_error_and_nothing_is_changed(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, load_beside, tmp_path / "c", "_read", 99) == [-1.0, -1.0]


def test_what_is_damaged_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "c", model(1.0))
    file = next((tmp_path / "c").glob("data-*"))
    file.write_bytes(file.read_bytes()[:-1] + b"@")
    tries, real = [], Loading.run
    monkeypatch.setattr(Loading, "run", lambda self, state: tries.append(1) or real(self, state))
    with pytest.raises(CheckpointError, match="wrong checksum"):
        load(tmp_path / "c", model(0.0))
    assert len(tries) == 1


def looks(path: Path, how: str) -> Any:
    if how == "latest":
        return latest(path.parent.parent)
    return verify(path) if how == "verify" else diff(path.parent / "other", path)


@pytest.mark.parametrize("how", ["latest", "verify", "diff"])
def test_what_replaces_a_checkpoint_while_it_is_looked_at_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It was called damaged, for its files were gone, and `latest` gave an older one."""
    path, times, real = step_path(tmp_path, 2), [0], contents.check_sizes
    save(path.parent / "other", model(3.0))
    save(step_path(tmp_path, 1), model(0.0))
    save(path, model(1.0))

    def replaced(source: Any) -> None:
        if source.path == path and times[0] < 2:
            times[0] += 1
            save(path, model(1.0 + times[0]))
        real(source)

    monkeypatch.setattr(contents, "check_sizes", replaced)
    found, data = looks(path, how), next(path.glob("data-*"))
    assert found == {"latest": path, "verify": data.stat().st_size, "diff": []}[how]
    assert times == [2]
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="damaged") if how != "latest" else nullcontext():
        assert looks(path, how) == step_path(tmp_path, 1)

"""Groups of an optimizer keep their settings, also where several hold the same parameters, or none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright.checkpoint import load, read_manifest, save
from shardwright.errors import CheckpointError

Ranks = Callable[..., list[Any]]


def grouped(model: nn.Module, *lrs: float) -> torch.optim.Optimizer:
    """All parameters in the first group, none in the others."""
    groups = [{"params": list(model.parameters()) if not n else [], "lr": lr} for n, lr in enumerate(lrs)]
    return torch.optim.SGD(groups)


def lrs_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def test_empty_groups_keep_their_settings(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    save(tmp_path / "c", model, grouped(model, 0.1, 0.2, 0.3))
    other = grouped(model, 0.5, 0.5, 0.5)
    load(tmp_path / "c", model, other)
    assert lrs_of(other) == [0.1, 0.2, 0.3]


def test_which_of_two_empty_groups_is_meant_is_asked(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    save(tmp_path / "c", model, grouped(model, 0.1, 0.2, 0.3))
    with pytest.raises(CheckpointError, match="make as many groups as were saved"):
        load(tmp_path / "c", model, grouped(model, 0.5, 0.5))
    save(tmp_path / "c", model, grouped(model, 0.1, 0.2, 0.2))
    other = grouped(model, 0.5, 0.5)
    load(tmp_path / "c", model, other)
    assert lrs_of(other) == [0.1, 0.2]


class Named(nn.Module):
    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(2)))


def test_names_of_parameters_stay_beside_their_parameters(tmp_path: Path) -> None:
    model, other = Named("abc"), Named("cab")
    save(tmp_path / "c", model, torch.optim.SGD(model.named_parameters(), lr=0.2))
    tuned = torch.optim.SGD(other.named_parameters(), lr=0.5)
    load(tmp_path / "c", other, tuned)
    assert tuned.param_groups[0]["lr"] == 0.2
    assert tuned.param_groups[0]["param_names"] == ["c", "a", "b"]
    plain = torch.optim.SGD(other.parameters())
    load(tmp_path / "c", other, plain)
    assert "param_names" not in plain.param_groups[0]


def stages(path: Path) -> list[str]:
    """Each rank has parameters of its own, by names."""
    model = Named("ab" if dist.get_rank() else "cd")
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1 + 0.1)
    save(path, model, optimizer)
    other = torch.optim.SGD(model.named_parameters(), lr=0.7)
    load(path, model, other)
    assert lrs_of(other) == [0.2]
    return list(other.param_groups[0]["param_names"])


def test_stages_may_name_their_parameters(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, stages, tmp_path / "c") == [["c", "d"], ["a", "b"]]
    assert len(read_manifest(tmp_path / "c").optimizers["optimizer"].groups[0]["params"]) == 4


@pytest.mark.parametrize("name", ["a/b", 3])
def test_a_state_without_a_name_of_its_own_is_refused(tmp_path: Path, name: Any) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight][name] = torch.ones(1, 1)
    with pytest.raises(CheckpointError, match="a name is text without a slash"):
        save(tmp_path / "c", model, optimizer)


def test_schedules_come_back(tmp_path: Path) -> None:
    """MultiStepLR keeps a Counter."""
    model = nn.Linear(1, 1)

    def scheduled() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])

    optimizer, schedule = scheduled()
    for _ in range(3):
        optimizer.step()
        schedule.step()
    save(tmp_path / "c", model, optimizer, schedule=schedule)
    other, again = scheduled()
    load(tmp_path / "c", model, other, schedule=again)
    assert again.state_dict() == schedule.state_dict()
    assert type(again.milestones) is type(schedule.milestones)

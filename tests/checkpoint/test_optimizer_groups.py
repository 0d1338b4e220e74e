"""Settings and states of an optimizer: empty groups, groups of the same parameters, states of any shape."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.checkpoint import load, read_manifest, save
from shardwright.errors import CheckpointError
from shardwright.parallel import parallelize_fsdp, parallelize_pipeline, parallelize_replicate
from shardwright.testing import rank_mesh
from tests.checkpoint.programs import whole

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


def given(model: nn.Module, seed: int) -> None:
    """Gradients, each in the layout of its parameter."""
    torch.manual_seed(seed)
    for one in model.parameters():
        full = torch.randn(one.shape)
        here = isinstance(one, sw.DTensor)
        one.grad = sw.distribute_tensor(full, one.device_mesh, one.placements) if here else full


def factored_states(path: Path) -> None:
    """States of other shapes than their parameters', into an optimizer that has not made them."""
    mesh = rank_mesh((2,), ("dp",))
    uneven = {"weight": {"dp": sw.Ragged((1, 2), (1,))}, "bias": {"dp": sw.Shard(0)}}
    places: list[Callable[[nn.Module], object]] = [
        lambda model: model,
        lambda model: parallelize_replicate(model, mesh),
        lambda model: parallelize_fsdp(model, mesh),
        lambda model: sw.distribute_module(model, mesh, uneven),
    ]
    for place, other in product(places, repeat=2):
        models = [nn.Linear(6, 5) for _ in range(3)]
        first, second, one = models
        one.load_state_dict(first.state_dict())
        place(first)
        other(second)
        optimizers = [torch.optim.Adafactor(model.parameters()) for model in models]
        for at in (0, 2):
            given(models[at], seed=0)
            optimizers[at].step()
        save(path, first, optimizers[0])
        load(path, second, optimizers[1])
        for at in (1, 2):
            given(models[at], seed=1)
            optimizers[at].step()
        for found, wanted in zip(second.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(whole(found), wanted)


def test_states_of_other_shapes_go_into_an_optimizer_that_has_none(ranks: Ranks, tmp_path: Path) -> None:
    """Where they were distributed they had been refused; plain ones stood beside distributed gradients."""
    ranks(2, factored_states, tmp_path / "one")


def layer_wise(model: nn.Module) -> torch.optim.Optimizer:
    """A rate for each layer, of those that this rank has."""
    by_layer: dict[int, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        by_layer.setdefault(int(name.split(".")[1]), []).append(parameter)
    groups = [{"params": each, "lr": 0.5**layer} for layer, each in by_layer.items()]
    return torch.optim.SGD(groups, momentum=0.9)


class Layers(nn.Module):
    """Four of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def rates(path: Path, cut: str | None, saves: bool) -> dict[str, float]:
    model = Layers()
    if cut:
        parallelize_pipeline(model, rank_mesh((2,), ("pp",)), [cut])
    optimizer = layer_wise(model)
    if saves:
        for group in optimizer.param_groups:
            group["lr"] *= 3
        save(path, model, optimizer)
    else:
        load(path, model, optimizer)
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}


@pytest.mark.parametrize("cut", ["layers.2", "layers.3"])
def test_stages_may_have_groups_of_their_own(ranks: Ranks, tmp_path: Path, cut: str) -> None:
    """A rate for each layer was taken for ranks that disagree."""
    ranks(2, rates, tmp_path / "c", cut, True)
    wanted = {f"layers.{n}.{kind}": 3 * 0.5**n for n in range(4) for kind in ("weight", "bias")}
    assert rates(tmp_path / "c", None, False) == wanted
    for found in ranks(2, rates, tmp_path / "c", "layers.1", False):
        assert found.items() <= wanted.items()


def rank_s_own_rate(path: Path, over: str) -> str:
    model = parallelize_replicate(nn.Linear(2, 2), rank_mesh((2,), ("dp",)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0 + (over == "rate") * dist.get_rank())
    with pytest.raises(CheckpointError) as error:
        save(path, model, optimizer, **({"only": 1} if over == "name" else {}))
    return str(error.value)


def test_one_parameter_has_one_rate(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks(2, rank_s_own_rate, tmp_path / "c", "rate"):
        assert "the ranks have different settings of model/weight (lr)" in said
    for said in ranks(2, rank_s_own_rate, tmp_path / "c", "name"):
        assert "a state cannot be called 'only', which is an argument" in said

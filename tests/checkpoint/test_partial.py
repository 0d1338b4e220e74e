"""What is loaded in part: by pattern, by any name of a tied tensor, or where an object fails to take it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright.checkpoint import async_save, latest, load, save, step_path
from shardwright.errors import CheckpointError

Ranks = Callable[..., list[Any]]


def tuned(value: float, lr: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(value)
            one.grad = torch.full_like(one, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("only", ["modle/*", ["model/*", "optimizr"], ["noise"]])
def test_a_pattern_that_fits_nothing_is_refused(tmp_path: Path, only: Any) -> None:
    save(tmp_path / "c", *tuned(1.0), noise=torch.Generator())
    model, optimizer = tuned(2.0)
    before = model.weight.clone()
    with pytest.raises(CheckpointError, match="fits no tensor, value or optimizer of the state"):
        load(tmp_path / "c", model, optimizer, only=only)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("only", ["model", ["model"], "model/*", "mod*"])
def test_a_module_is_loaded_by_its_name(tmp_path: Path, only: Any) -> None:
    save(tmp_path / "c", *tuned(1.0, lr=0.3))
    model, optimizer = tuned(2.0)
    load(tmp_path / "c", model, optimizer, only=only)
    assert torch.equal(model.weight, tuned(1.0, lr=0.3)[0].weight)
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("only", ["optimizer", "optimizer/*", "opt*"])
def test_an_optimizer_is_loaded_as_a_whole(tmp_path: Path, only: str) -> None:
    save(tmp_path / "c", *tuned(1.0, lr=0.3))
    model, optimizer = tuned(2.0)
    before = model.weight.clone()
    load(tmp_path / "c", model, optimizer, only=only)
    assert torch.equal(model.weight, before)
    assert optimizer.param_groups[0]["lr"] == 0.3
    assert optimizer.state[model.weight]["momentum_buffer"].tolist() == [[1.0] * 2] * 2


def test_a_part_of_an_optimizer_says_how_the_whole_is_loaded(tmp_path: Path) -> None:
    save(tmp_path / "c", *tuned(1.0))
    with pytest.raises(CheckpointError, match="an optimizer is loaded as a whole, by 'optimizer'"):
        load(tmp_path / "c", *tuned(2.0), only=["model/*", "optimizer/model/weight/*"])


def named_by_the_other_rank(path: Path) -> None:
    model = nn.Module()
    model.register_parameter(f"w{dist.get_rank()}", nn.Parameter(torch.full((2,), 1.0)))
    save(path, model)
    load(path, model, only="model/w1")


def test_a_pattern_may_fit_on_one_rank_alone(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, named_by_the_other_rank, tmp_path / "c")


class Tied(nn.Module):
    def __init__(self, value: float, names: str) -> None:
        super().__init__()
        weight = nn.Parameter(torch.full((3,), value))
        for name in names:
            setattr(self, name, weight)


def stepped(model: Tied) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    model.a.grad = model.a.detach().clone()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("only", ["model/b", "model/c", ["model/c", "model/b"]])
def test_a_tied_tensor_is_loaded_by_any_of_its_names(tmp_path: Path, only: Any) -> None:
    save(tmp_path / "c", Tied(1.0, "abc"))
    model = Tied(2.0, "abc")
    load(tmp_path / "c", model, only=only)
    assert model.a.tolist() == [1.0] * 3


def test_names_of_a_tied_tensor_may_come_in_another_order(tmp_path: Path) -> None:
    model, other = Tied(1.0, "abc"), Tied(2.0, "cab")
    save(tmp_path / "c", model, stepped(model))
    tuned = torch.optim.SGD(other.parameters(), lr=0.0, momentum=0.9)
    load(tmp_path / "c", other, tuned)
    assert tuned.state[other.a]["momentum_buffer"].tolist() == [1.0] * 3


def test_ties_that_only_one_side_has_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "tied", Tied(1.0, "ab"))
    apart = Tied(1.0, "a")
    apart.b = nn.Parameter(torch.full((3,), 5.0))
    save(tmp_path / "apart", apart)
    with pytest.raises(CheckpointError, match="is tied to model/a in the checkpoint but not in the model"):
        load(tmp_path / "tied", apart)
    with pytest.raises(CheckpointError, match="is tied to model/a in the model but not in the checkpoint"):
        load(tmp_path / "apart", Tied(1.0, "ab"))


class Stubborn:
    """Takes no state on rank 1."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": 3}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        if dist.get_rank() == 1:
            raise KeyError("at2")


def stubborn(path: Path) -> str:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(1.0)
    save(path, model, loader=Stubborn())
    with pytest.raises(CheckpointError) as error:
        load(path, model, loader=Stubborn())
    return str(error.value)


def test_an_object_that_fails_on_one_rank_is_told_to_all(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(2, stubborn, tmp_path / "c")
    assert found[0] == found[1]
    assert "loader did not take on rank 1" in found[0]
    assert "KeyError: 'at2'" in found[0]
    assert "The state is loaded in part (tensors before it, nothing after it)" in found[0]


def test_a_relative_path_means_what_it_meant_when_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    saving = async_save("c", nn.Linear(300, 300))
    os.chdir(tmp_path / "there")
    assert saving.wait() == tmp_path / "here" / "c"
    load(tmp_path / "here" / "c", nn.Linear(300, 300))
    assert not list((tmp_path / "there").iterdir())


def test_a_tilde_is_the_home_as_in_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert save(step_path("~/run", 1), nn.Linear(2, 2)) == tmp_path / "home/run/checkpoints/step-00000001"
    assert latest("~/run").parent.parent == tmp_path / "home/run"
    load("~/run/checkpoints/step-00000001", nn.Linear(2, 2))
    assert [one.name for one in tmp_path.iterdir()] == ["home"]
    with pytest.raises(CheckpointError, match=r"user who is not known here"):
        save("~nobody-of-this-name/run", nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["complex32", "complex128", "float8_e8m0fnu", "float4_e2m1fn_x2"])
def test_elements_without_a_name_in_the_format_are_kept_bit_for_bit(
    tmp_path: Path, name: str, recwarn: pytest.WarningsRecorder
) -> None:
    """torch warns of its own complex halves."""
    dtype = getattr(torch, name)
    bits = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
    save(tmp_path / "c", x=bits.view(dtype).view(2, 3))
    for in_place in (False, True):
        x = torch.zeros_like(bits).view(dtype).view(2, 3)
        load(tmp_path / "c", x=x, in_place=in_place)
        assert torch.equal(x.view(torch.uint8).flatten(), bits)


@pytest.mark.parametrize("only", [3, [3], [None], b"x"])
def test_what_is_no_pattern_is_refused(tmp_path: Path, only: Any) -> None:
    save(tmp_path / "c", *tuned(1.0))
    with pytest.raises(CheckpointError, match=r"only=.*: give a pattern of paths, or a list of them"):
        load(tmp_path / "c", *tuned(2.0), only=only)


def layered(value: float) -> nn.Module:
    """Modules whose names begin alike."""
    names = ("layer", "layer1", "layers")
    model = nn.ModuleDict({name: nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)) for name in names})
    for one in (*model.parameters(), *model.buffers()):
        nn.init.constant_(one, value)
    return model


@pytest.mark.parametrize("only", ["model/layer", "model/layer.1", "model/lay*.0", ["model/*.running_mean"]])
def test_a_pattern_that_fits_a_module_means_all_in_it(tmp_path: Path, only: Any) -> None:
    save(tmp_path / "c", layered(1), **{"model.old": torch.ones(2)})
    model, old = layered(2), torch.zeros(2)
    load(tmp_path / "c", model, **{"model.old": old}, only=only)
    found = {name for name, one in model.state_dict().items() if (one == 1).all()}
    wanted = {
        "model/layer": r"layer\..*",
        "model/layer.1": r"layer\.1\..*",
        "model/lay*.0": r"lay.*\.0\..*",
    }.get(str(only), r".*running_mean")
    assert found == {name for name in model.state_dict() if re.fullmatch(wanted, name)}
    assert not old.any()


@pytest.mark.parametrize("path", [3, None, b"x", []])
def test_what_is_no_path_is_refused(path: Any) -> None:
    for take in (save, load, latest):
        with pytest.raises(CheckpointError, match="is no path: give a text, a Path, or an address"):
            take(path)


def test_a_name_is_a_pattern_of_itself(tmp_path: Path) -> None:
    """Brackets in it were read as a set of letters."""
    model = nn.ModuleDict({"a[0]": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    save(tmp_path / "c", model)
    other = nn.ModuleDict({"a[0]": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    load(tmp_path / "c", other, only="model/a[0].weight")
    assert torch.equal(other["a[0]"].weight, model["a[0]"].weight)
    assert not torch.equal(other["a[0]"].bias, model["a[0]"].bias)

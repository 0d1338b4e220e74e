"""What torch's `state_dict` says is in the checkpoint and comes back, or the save is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardwright.checkpoint import load, save, step_path, verify
from shardwright.errors import CheckpointError


class Counting(torch.optim.SGD):
    """It keeps something that is of no parameter, as torch allows."""

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = self.state.get("steps", 0) + 1
        self.state["last"] = {"large": torch.full((30_000,), float(self.state["steps"])), "nan": [1, None]}
        return super().step(closure)


def counted(model: nn.Module, steps: int) -> Counting:
    optimizer = Counting(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    return optimizer


def test_what_an_optimizer_keeps_for_no_parameter_comes_back(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path / "c", model, counted(model, 3))
    other = counted(model, 1)
    other.state["only here"] = 1
    load(tmp_path / "c", model, other)
    assert [name for name in other.state if isinstance(name, str)] == ["steps", "last"]
    assert other.state["steps"] == 3
    assert other.state["last"]["nan"] == [1, None]
    assert torch.equal(other.state["last"]["large"], torch.full((30_000,), 3.0))
    assert verify(tmp_path / "c") > 120_000
    with pytest.raises(CheckpointError, match="keeps 'steps' for no parameter"):
        save(tmp_path / "torch", model, counted(model, 1), format="dcp")
    assert not (tmp_path / "torch").exists()


class Telling(torch.optim.SGD):
    """Its `state_dict` says more than torch's."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scale": 2.0}


def test_what_an_optimizer_says_beside_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"state_dict\(\) of optimizer gives 'scale' beside"):
        save(tmp_path / "c", model, Telling(model.parameters()))
    assert not (tmp_path / "c").exists()


class Numbered(nn.Module):
    """It saves a number among its tensors, as modules did before there was extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.number = nn.Parameter(torch.ones(1)), 3

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}number"] = self.number


def test_what_a_module_saves_beside_its_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model gives '0.number', which is no tensor"):
        save(tmp_path / "c", nn.Sequential(Numbered()))
    assert not (tmp_path / "c").exists()


class Keeping(nn.Module):
    """A module with extra state."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def test_extra_state_may_be_large_tensors(tmp_path: Path) -> None:
    large = torch.arange(40_000.0)
    model = nn.Sequential(Keeping(large), Keeping({"a/b": large, "a": {"b": -large}}))
    save(tmp_path / "c", model)
    other = nn.Sequential(Keeping(None), Keeping(None))
    load(tmp_path / "c", other)
    assert torch.equal(other[0].kept, large)
    assert torch.equal(other[1].kept["a/b"], large)
    assert torch.equal(other[1].kept["a"]["b"], -large)


def test_extra_state_of_a_module_of_two_names_and_a_tensor_of_its_name_are_there(tmp_path: Path) -> None:
    """The first was refused for its second name, the second was neither saved nor missed."""
    model, other = ({"a": one, "b": one, "plain": nn.Module()} for one in (Keeping(1), Keeping(2)))
    for value, modules in enumerate((model, other)):
        modules["plain"].register_buffer("_extra_state", torch.full((2,), float(value)))
    save(tmp_path / "c", nn.ModuleDict(model))
    load(tmp_path / "c", nn.ModuleDict(other))
    assert other["b"].kept == 1
    assert other["plain"].get_buffer("_extra_state").tolist() == [0.0, 0.0]


class Deriving(nn.Module):
    """It derives a value from its weight whenever that has been loaded."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), value))
        self.register_load_state_dict_post_hook(lambda one, _: one.derive())
        self.derive()

    def derive(self) -> None:
        self.twice = self.weight.detach() * 2


@pytest.mark.parametrize("in_place", [False, True])
def test_a_module_hears_that_it_was_loaded(tmp_path: Path, in_place: bool) -> None:
    save(tmp_path / "c", nn.Sequential(Deriving(1.0)), other=Deriving(2.0))
    model, other = nn.Sequential(Deriving(5.0)), Deriving(5.0)
    other.twice.zero_()
    load(tmp_path / "c", model, other=other, only="model/*", in_place=in_place)
    assert model[0].twice.tolist() == [2.0] * 3
    assert other.twice.tolist() == [0.0] * 3


@pytest.mark.parametrize("step", [-1, 1.5, None, "3"])
def test_a_step_that_is_none_has_no_path(step: Any) -> None:
    with pytest.raises(CheckpointError, match="is no number of steps"):
        step_path("run", step)


def test_extra_state_inside_a_wrapper_of_torch_s(tmp_path: Path) -> None:
    """The wrapper leaves its own name out of what it saves."""
    model = nn.Sequential(checkpoint_wrapper(Keeping(3)))
    save(tmp_path / "c", model)
    other = nn.Sequential(checkpoint_wrapper(Keeping(0)))
    load(tmp_path / "c", other)
    assert other[0].kept == 3

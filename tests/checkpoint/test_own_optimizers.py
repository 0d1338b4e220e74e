"""What an optimizer does itself when it is saved and loaded: hooks, methods and lists of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.checkpoint import load, save
from shardwright.errors import CheckpointError
from shardwright.testing import rank_mesh

Ranks = Callable[..., list[Any]]


class Settled(torch.optim.SGD):
    """It makes something of its groups whenever a state is loaded, as torch lets a class do."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["settled"] = True


class Loading(torch.optim.SGD):
    """It looks at a state before it takes it."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict
        super().load_state_dict(state_dict)


def stepped(kind: type[torch.optim.SGD]) -> tuple[nn.Module, torch.optim.SGD]:
    model = nn.Linear(2, 2)
    optimizer = kind([{"params": [model.bias]}, {"params": [model.weight], "lr": 0.5}], lr=0.1, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("kind", [Settled, Loading])
def test_methods_of_an_optimizer_s_own_load_it(tmp_path: Path, kind: type[torch.optim.SGD]) -> None:
    model, optimizer = stepped(kind)
    save(tmp_path / "c", model, optimizer)
    other, fresh = stepped(kind)
    load(tmp_path / "c", other, fresh)
    wanted = optimizer.state_dict()
    for group in wanted["param_groups"]:
        group.update({"settled": True} if kind is Settled else {})
    found = fresh.state_dict()
    assert found["param_groups"] == wanted["param_groups"]
    for place, state in wanted["state"].items():
        assert torch.equal(found["state"][place]["momentum_buffer"], state["momentum_buffer"])
    if kind is Loading:
        assert list(fresh.seen) == ["state", "param_groups"]
        assert [group["params"] for group in fresh.seen["param_groups"]] == [[0], [1]]


def test_hooks_of_an_optimizer_hear_of_saves_and_loads(tmp_path: Path) -> None:
    heard: list[str] = []
    model, optimizer = stepped(torch.optim.SGD)
    optimizer.register_state_dict_pre_hook(lambda _: heard.append("asked"))
    optimizer.register_load_state_dict_post_hook(lambda _: heard.append("loaded"))
    save(tmp_path / "c", model, optimizer)
    load(tmp_path / "c", model, optimizer)
    assert heard == ["asked", "loaded"]
    optimizer.register_load_state_dict_pre_hook(lambda _, given: heard.append(sorted(given)[1]))
    load(tmp_path / "c", model, optimizer)
    assert heard == ["asked", "loaded", "state", "loaded"]


def _adds(where: str) -> Callable[[Any, dict[str, Any]], None]:
    def add(_: Any, told: dict[str, Any]) -> None:
        told.update({"more": 1} if where == "top" else {})
        told["param_groups"][1].update({"more": 1} if where == "group" else {})
        if where == "state":
            told["state"][0] = {**told["state"][0], "more": 1}

    return add


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("top", "gives 'more' beside its groups and states"),
        ("group", r"gives 'more' in its param_groups\[1\]"),
        ("state", r"gives 'more' in its state\[0\]"),
    ],
)
def test_what_a_hook_adds_is_refused(tmp_path: Path, where: str, words: str) -> None:
    """It was left out without a word."""
    model, optimizer = stepped(torch.optim.SGD)
    optimizer.register_state_dict_post_hook(_adds(where))
    with pytest.raises(CheckpointError, match=words):
        save(tmp_path / "c", model, optimizer)
    assert not (tmp_path / "c").exists()


def _line_search(placed: bool) -> tuple[nn.Module, torch.optim.LBFGS, Callable[[], torch.Tensor]]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    x = torch.randn(6, 5)
    if placed:
        mesh = rank_mesh((2,), ("tp",))
        plan = {"0.weight": {"tp": sw.Shard(0)}, "*": {"tp": sw.Replicate()}}
        model = sw.distribute_module(model, mesh, plan)
        x = sw.distribute_tensor(x, mesh, [sw.Replicate()], src_data_rank=None)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    return model, optimizer, closure


def _whole(model: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor() if isinstance(p, sw.DTensor) else p.detach() for p in model.parameters()]


def _search(path: Path, saves: bool | None, loads: bool | None) -> list[torch.Tensor]:
    """The parameters after two steps, or one and one after the state was saved and loaded."""
    if saves is not None:
        model, optimizer, closure = _line_search(saves)
        optimizer.step(closure)
        save(path, model, optimizer)
    if loads is None:
        optimizer.step(closure)
        return _whole(model)
    other, fresh, closure = _line_search(loads)
    load(path, other, fresh)
    fresh.step(closure)
    return _whole(other)


@pytest.mark.parametrize(("saves", "loads"), [(False, True), (True, False), (True, True)])
def test_what_an_optimizer_keeps_in_lists_lies_as_its_parameters(
    ranks: Ranks, tmp_path: Path, saves: bool, loads: bool
) -> None:
    """LBFGS holds lists of directions: they could not be loaded into a fresh one beside placed parameters."""
    one = _search(tmp_path / "one", False, None)
    torch.set_num_threads(1)
    if not saves:
        _search(tmp_path / "c", False, None)
    found = ranks(2, _search, tmp_path / "c", saves or None, True) if loads else None
    if not loads:
        ranks(2, _search, tmp_path / "c", True, None)
        found = [_search(tmp_path / "c", None, False)]
    for each in found:
        for p, q in zip(each, one, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)

"""What the ranks of the checkpoint tests do: save a model under one layout, load it under another."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwright import Partial
from shardwright.checkpoint import async_save, load, load_hf, save, save_hf
from shardwright.errors import CheckpointError
from shardwright.tensor import DTensor, distribute_tensor

Placements = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """A mesh and where the parameters of `Model` lie on it; a parameter that is not named is replicated."""

    axes: dict[str, int]
    placements: dict[str, Placements]
    order: tuple[str, ...] | None = None


class Model(nn.Module):
    """Uneven sizes, a tied weight, a 0-d and an empty parameter, a saved buffer and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(7, 6))
        self.experts = nn.Parameter(torch.randn(5, 3, 4))
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.head = self.embedding
        self.register_buffer("seen", torch.randint(0, 9, (3,)))
        self.register_buffer("cache", torch.randn(2), persistent=False)

    def forward(self) -> torch.Tensor:
        return (self.embedding**2).sum() + (self.experts**3).sum() + self.scale.exp() + self.empty.sum()


def build(setup: Setup | None, seed: int) -> Model:
    """The model, placed; the same values on every mesh."""
    torch.manual_seed(seed)
    model = Model()
    if setup is None:
        return model
    mesh = init_device_mesh("cpu", tuple(setup.axes.values()), mesh_dim_names=tuple(setup.axes))
    for name in ("embedding", "experts", "scale", "empty"):
        placed = place(getattr(model, name).data, mesh, setup.placements.get(name, {}), setup.order)
        setattr(model, name, nn.Parameter(placed))
    model.head = model.embedding
    return model


def place(x: torch.Tensor, mesh: Any, placements: Placements, order: tuple[str, ...] | None) -> DTensor:
    """This rank's part of a tensor that every rank has."""
    return distribute_tensor(x, mesh, placements, src_data_rank=None, order=order)


def tune(model: Model, steps: int, kind: str = "AdamW") -> torch.optim.Optimizer:
    """An optimizer with state. Gradients follow from the values, so every mesh takes the same steps."""
    groups = [
        {"params": [model.embedding, model.scale], "lr": 0.1},
        {"params": [model.experts, model.empty], "lr": 0.05},
    ]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(groups, lr=0.2)
    for _ in range(steps):
        step(model, optimizer)
    return optimizer


def step(model: Model, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.numel():
            parameter.grad = parameter.detach() * 0.5
    optimizer.step()


def values(model: Model, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    """Every tensor of the model and of the optimizer's state, whole."""
    found = {name: whole(one) for name, one in model.state_dict().items()}
    names = {id(one): name for name, one in model.named_parameters()}
    for parameter, state in optimizer.state.items() if optimizer else ():
        found |= {f"{names[id(parameter)]}/{key}": whole(one) for key, one in state.items()}
    return found


def whole(x: Any) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else torch.as_tensor(x)).detach().clone()


def save_it(path: Path, setup: Setup | None, **more: Any) -> dict[str, torch.Tensor]:
    model = build(setup, seed=1)
    optimizer = tune(model, steps=3)
    save(path, model=model, optimizer=optimizer, extra={"note": "hello"}, step=3, **more)
    return values(model, optimizer)


def load_it(
    path: Path, setup: Setup | None, steps_before: int = 0
) -> tuple[dict[str, torch.Tensor], Any, Any]:
    """Load into a model of other values; what it then holds, and what it holds one step later."""
    model = build(setup, seed=2)
    optimizer = tune(model, steps_before)
    loaded = load(path, model=model, optimizer=optimizer)
    assert model.head is model.embedding
    found = values(model, optimizer)
    step(model, optimizer)
    return found, values(model, optimizer), (loaded.step, loaded.extra, loaded.rng_restored)


def save_then_draw(path: Path) -> tuple[float, float]:
    """What the generators of this rank give after a checkpoint was saved."""
    torch.manual_seed(100 + dist.get_rank())
    random.seed(100 + dist.get_rank())
    save(path, model=nn.BatchNorm1d(1), step=0)
    return torch.rand(()).item(), random.random()


def load_then_draw(path: Path) -> tuple[float, float]:
    load(path, model=nn.BatchNorm1d(1))
    return torch.rand(()).item(), random.random()


def refused(path: Path, setup: Setup | None, change: str, kind: str = "AdamW") -> tuple[str, bool]:
    """Why a load is refused, and whether model and optimizer are as they were."""
    model = build(setup, seed=2)
    CHANGES[change](model)
    optimizer = tune(model, 1, kind)
    if change == "regroup":
        optimizer = torch.optim.AdamW(model.parameters())
    if change == "foreign parameter":
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        optimizer.param_groups[0]["lr"] = 0.1
    before = _everything(model, optimizer)
    try:
        load(path, model=model, optimizer=optimizer)
    except CheckpointError as error:
        return str(error), same(before, _everything(model, optimizer))
    return "", False


def _everything(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    known = {id(one) for one in model.parameters()}
    settings = [group["lr"] for group in optimizer.param_groups]
    state = {p: one for p, one in optimizer.state.items() if id(p) in known}
    probe = torch.optim.SGD(list(model.parameters()))
    probe.state.update(state)
    return {**values(model, probe), "settings": torch.tensor(settings), "rng": torch.get_rng_state()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _untie(model: Model) -> None:
    model.head = nn.Parameter(model.embedding.detach().clone())


CHANGES: dict[str, Callable[[Model], Any]] = {
    "nothing": lambda model: None,
    "regroup": lambda model: None,
    "foreign parameter": lambda model: None,
    "shape": lambda model: setattr(model, "scale", nn.Parameter(torch.ones(2))),
    "dtype": lambda model: setattr(model, "scale", nn.Parameter(torch.ones((), dtype=torch.float64))),
    "one more": lambda model: model.register_parameter("more", nn.Parameter(torch.ones(1))),
    "one less": lambda model: delattr(model, "seen"),
    "untied": _untie,
}


def save_unreduced(path: Path) -> str:
    """A parameter that is still to be summed is no value."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = nn.Module()
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, {"dp": Partial()}))
    try:
        save(path, model=model)
    except CheckpointError as error:
        return str(error)
    return ""


def save_where_one_rank_fails(path: Path) -> str:
    """Every rank hears of it."""
    model = nn.Linear(2, 2)
    if dist.get_rank() == 1:
        model.register_state_dict_post_hook(_break)
    try:
        save(path, model=model)
    except CheckpointError as error:
        return str(error)
    return ""


def arguments_of_one_rank(path: Path) -> list[str]:
    """What each verb says where the second rank names no path, other maps or patterns, or another path."""
    model, first = nn.Linear(2, 2), dist.get_rank() == 0
    save(path / "c", model)
    save_hf(model, path / "hf")
    nobody: Any = None
    number: Any = 3
    calls: list[Callable[[], object]] = [
        lambda: save(path / "n" if first else nobody, model),
        lambda: save(path / "n" if first else nobody, model, format="dcp"),
        lambda: async_save(path / "n" if first else nobody, model),
        lambda: load(path / "c" if first else nobody, model),
        lambda: load(path / "c", model, only=None if first else number),
        lambda: load(path / "c", model, only=None if first else "model/*"),
        lambda: load_hf(model, path / "hf" if first else nobody),
        lambda: save_hf(model, path / "n" if first else nobody),
        lambda: save_hf(model, path / "n", maps=() if first else nobody),
        lambda: save(path / f"own-{dist.get_rank()}", model),
    ]
    return [_said(call) for call in calls]


def _said(call: Callable[[], object]) -> str:
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return "done"


def _break(*_: Any) -> None:
    raise OSError("the disk is full")

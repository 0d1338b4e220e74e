"""Torch's tools and this library exchange files, optimizers included, and neither needs the other to read."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from shardwright import Interleaved, Ragged, Replicate, Shard, distribute_module
from shardwright.checkpoint import convert, load, save
from shardwright.errors import CheckpointError
from shardwright.parallel import parallelize_fsdp
from shardwright.testing import rank_mesh
from tests.checkpoint import torch_reader
from tests.checkpoint.programs import same
from tests.programs import Program

Ranks = Callable[..., list[Any]]
PLACES: dict[str, dict[str, Any]] = {
    "0.weight": {"dp": Ragged((1, 2), dims=(0, 1)), "tp": Shard(1)},
    "2.weight": {"dp": Interleaved(1, 2), "tp": Replicate()},
    "3.bias": {"dp": Shard(0), "tp": Shard(0)},
}


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = torch_reader.make()
    torch_reader.fill(model)
    optimizer.step()
    return model, optimizer


def on_a_mesh(how: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same, placed, and trained by the same step."""
    model, _ = torch_reader.make()
    if how == "placements":
        distribute_module(model, rank_mesh((2, 2), ("dp", "tp")), PLACES)
    else:
        parallelize_fsdp(model, rank_mesh((2,), ("dp",)))
    rest = [one for name, one in model.named_parameters() if name != "0.weight"]
    groups = [{"params": [model[0].weight], "lr": 0.5}, {"params": rest, "lr": 0.25}]
    optimizer = torch.optim.AdamW(groups, lr=0.125)
    torch_reader.fill(model)
    optimizer.step()
    return model, optimizer


def save_for_torch(path: Path, how: str) -> dict[str, torch.Tensor]:
    warnings.simplefilter("ignore")
    model, optimizer = on_a_mesh(how)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    save(path, model, optimizer, step=3, extra={"note": (1, 2)}, schedule=schedule, format="dcp")
    return torch_reader.told(model, optimizer)


def read_by_torch(path: Path, world: int) -> dict[str, dict[str, torch.Tensor]]:
    out = path.with_name("out.pt")
    words = [str(path), str(out)]
    ranks = [words] if world == 1 else [[*words, str(rank), str(world)] for rank in range(world)]
    for running in [Program(Path(torch_reader.__file__), *words) for words in ranks]:
        ended = running.end()
        assert ended.returncode == 0, ended.stderr
    found: dict[str, dict[str, torch.Tensor]] = torch.load(out)
    return found


@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "world", "readers"), [("placements", 4, 1), pytest.param("fsdp", 2, 2, marks=pytest.mark.slow)]
)
def test_torch_reads_what_was_written_for_it_without_this_library(
    ranks: Ranks, tmp_path: Path, how: str, world: int, readers: int
) -> None:
    """A program that does not import it; the reference is plain torch on one device."""
    saved = ranks(world, save_for_torch, tmp_path / "c", how)[0]
    model, optimizer = trained()
    assert same(saved, torch_reader.told(model, optimizer))
    found = read_by_torch(tmp_path / "c", readers)
    assert same(found["before"], saved)
    torch_reader.fill(model)
    optimizer.step()
    assert same(found["after"], torch_reader.told(model, optimizer))


def test_what_was_written_for_torch_comes_back(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks(4, save_for_torch, tmp_path / "c", "placements")[0]
    with pytest.raises(CheckpointError, match="is a folder of torch's distributed checkpoint"):
        load(tmp_path / "c", torch_reader.make()[0])
    convert(tmp_path / "c", tmp_path / "ours")
    model, optimizer = torch_reader.make()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    loaded = load(tmp_path / "ours", model, optimizer, schedule=schedule)
    assert same(torch_reader.told(model, optimizer), saved)
    assert schedule.step_size == 10
    assert (loaded.step, loaded.extra) == (3, {"note": (1, 2)})


def write_by_torch(path: Path, flat: bool) -> dict[str, torch.Tensor]:
    """A model of fully_shard and its optimizer, by torch alone."""
    warnings.simplefilter("ignore")
    model, _ = torch_reader.make()
    fully_shard(model, mesh=rank_mesh((2,), ("dp",)))
    rest = [one for name, one in model.named_parameters() if name != "0.weight"]
    groups = [{"params": [model[0].weight], "lr": 0.5}, {"params": rest, "lr": 0.25}]
    optimizer = torch.optim.AdamW(groups, lr=0.125)
    torch_reader.fill(model)
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": of_model, "optim": of_optimizer, "epoch": 4}, checkpoint_id=path)
    return torch_reader.told(model, optimizer)


def load_on_a_mesh(path: Path) -> dict[str, torch.Tensor]:
    model, optimizer = on_a_mesh("placements")
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    optimizer.state.clear()
    optimizer.param_groups[0]["lr"] = 9.0
    load(path, model, optimizer)
    return torch_reader.told(model, optimizer)


@pytest.mark.parametrize("flat", [False, True])
def test_an_optimizer_of_fully_shard_is_loaded_onto_any_mesh(
    ranks: Ranks, tmp_path: Path, flat: bool
) -> None:
    wanted = ranks(2, write_by_torch, tmp_path / "theirs", flat)[0]
    convert(tmp_path / "theirs", tmp_path / "ours")
    for found in ranks(4, load_on_a_mesh, tmp_path / "ours"):
        assert same(found, wanted)


def numbered(path: Path, **more: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = trained()
    state = {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(), **more}
    torch.save(state, path)
    return model, optimizer


def test_an_optimizer_that_knows_numbers_is_loaded_by_name(tmp_path: Path) -> None:
    model, optimizer = numbered(tmp_path / "theirs.pt", epoch=3)
    names = [name for name, _ in model.named_parameters()]
    convert(tmp_path / "theirs.pt", tmp_path / "ours", parameters=names)
    other, tuned = torch_reader.make()
    tuned.param_groups[0]["lr"] = 3.0
    assert load(tmp_path / "ours", other, tuned, epoch=0).values == {"epoch": 3}
    assert same(torch_reader.told(other, tuned), torch_reader.told(model, optimizer))


def test_numbers_without_names_and_names_in_another_order_are_refused(tmp_path: Path) -> None:
    model, _ = numbered(tmp_path / "theirs.pt")
    names = [name for name, _ in model.named_parameters()]
    source, target = tmp_path / "theirs.pt", tmp_path / "ours"
    with pytest.raises(CheckpointError, match="knows its 6 parameters by number only"):
        convert(source, target)
    with pytest.raises(CheckpointError, match="has 6 parameters, parameters= names 5"):
        convert(source, target, parameters=names[1:])
    with pytest.raises(CheckpointError, match=r"exp_avg of .* are the parameters named in the order"):
        convert(source, target, parameters=names[::-1])
    with pytest.raises(CheckpointError, match="a parameter 'elsewhere', and there is no tensor"):
        convert(source, target, parameters=["elsewhere", *names[1:]])
    assert not target.exists()


def test_names_that_the_optimizer_keeps_are_enough(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.5, momentum=0.9)
    torch_reader.fill(model)
    optimizer.step()
    torch.save({"model": model.state_dict(), "opt": optimizer.state_dict()}, tmp_path / "theirs.pt")
    convert(tmp_path / "theirs.pt", tmp_path / "ours")
    other = nn.Linear(3, 2)
    tuned = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.1)
    load(tmp_path / "ours", other, tuned)
    assert tuned.param_groups[0]["lr"] == 0.5
    wanted = optimizer.state[model.weight]["momentum_buffer"]
    assert torch.equal(tuned.state[other.weight]["momentum_buffer"], wanted)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_names_of_groups_and_notes_of_schedulers_go_both_ways(tmp_path: Path) -> None:
    """Torch found no names in what was written for it; what a scheduler notes was another class's setting."""
    made = []
    for _ in range(3):
        model = nn.Linear(3, 2)
        made.append((model, torch.optim.SGD(model.named_parameters(), lr=0.5, momentum=0.9)))
    model, optimizer = made[0]
    torch_reader.fill(model)
    optimizer.step()
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.25, total_steps=9)
    save(tmp_path / "dcp", model, optimizer, format="dcp")
    state = dict(zip(("model", "optimizer"), get_state_dict(*made[1]), strict=True))
    state["optimizer"]["param_groups"][0]["param_names"] = []
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert state["optimizer"]["param_groups"][0]["param_names"] == ["weight", "bias"]
    set_state_dict(*made[1], model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    convert(tmp_path / "dcp", tmp_path / "ours")
    load(tmp_path / "ours", *made[2])
    for one in made[1:]:
        assert same(torch_reader.told(*one), torch_reader.told(model, optimizer))


def test_an_optimizer_of_another_class_is_refused(tmp_path: Path) -> None:
    model, _ = numbered(tmp_path / "theirs.pt")
    names = [name for name, _ in model.named_parameters()]
    convert(tmp_path / "theirs.pt", tmp_path / "ours", parameters=names)
    rest = [one for name, one in model.named_parameters() if name != "0.weight"]
    other = torch.optim.SGD([{"params": [model[0].weight]}, {"params": rest}])
    with pytest.raises(CheckpointError, match="it is of an optimizer of another class"):
        load(tmp_path / "ours", model, other)


def test_names_that_begin_with_model_are_those_of_the_model(tmp_path: Path) -> None:
    """A language model of `transformers` has `model.layers...` beside `lm_head`."""
    model = nn.ModuleDict({"model": nn.Linear(3, 2), "head": nn.Linear(2, 2)})
    torch.save(model.state_dict(), tmp_path / "theirs.pt")
    convert(tmp_path / "theirs.pt", tmp_path / "ours")
    other = nn.ModuleDict({"model": nn.Linear(3, 2), "head": nn.Linear(2, 2)})
    load(tmp_path / "ours", other)
    assert torch.equal(other["model"].weight, model["model"].weight)


def refusals(path: Path) -> list[str]:
    warnings.simplefilter("ignore")
    model, _ = on_a_mesh("fsdp")
    found = []
    for state in ({"mine": dist.get_rank()}, {"mine": 1}, {"mine": 2}):
        try:
            save(path, model, **state, format="dcp")
            found.append("")
        except CheckpointError as error:
            found.append(str(error))
    return found


def test_what_torchs_format_cannot_hold_is_refused_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(2, refusals, tmp_path / "c")
    assert found[0] == found[1]
    assert "mine differs between ranks, and torch's format has room for one value" in found[0][0]
    assert found[0][1] == ""
    assert 'with format="dcp" name a folder that is new' in found[0][2]
    with pytest.raises(CheckpointError, match="format='zip' is not known"):
        save(tmp_path / "d", nn.Linear(1, 1), format="zip")
    assert not (tmp_path / "d").exists()


def test_what_torch_cannot_size_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^odd: torch's format has no torch\.bits8: save its view"):
        save(tmp_path / "d", odd=torch.zeros(3, dtype=torch.uint8).view(torch.bits8), format="dcp")
    assert not (tmp_path / "d").exists()


def fail_on_one(path: Path) -> tuple[str, bool]:
    warnings.simplefilter("ignore")
    model, _ = on_a_mesh("fsdp")
    if dist.get_rank() == 1:
        torch.save = _full
    try:
        save(path, model, format="dcp")
    except CheckpointError as error:
        return str(error), path.exists()
    return "", True


def _full(*_: Any, **__: Any) -> None:
    raise OSError("the disk is full")


def test_a_rank_that_cannot_write_for_torch_is_told_to_all(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(2, fail_on_one, tmp_path / "c", fresh=True)
    assert [one for one, _ in found] == [found[0][0]] * 2
    assert "failed on rank 1: OSError: the disk is full" in found[0][0]
    assert not (tmp_path / "c").exists()


class Keeps:
    """Has a state that a dict tells, a large tensor in it."""

    def __init__(self, kept: dict[str, Any]) -> None:
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state


def two_networks(seed: int) -> tuple[dict[str, nn.Module], list[torch.optim.Optimizer]]:
    torch.manual_seed(seed)
    parts: dict[str, nn.Module] = {"maker": nn.Linear(3, 4), "critic": nn.Linear(4, 1)}
    tuned = [torch.optim.SGD(one.parameters(), lr=0.1 * seed, momentum=0.9) for one in parts.values()]
    for part, optimizer in zip(parts.values(), tuned, strict=True):
        torch_reader.fill(part)
        optimizer.step()
    return parts, tuned


def test_optimizers_of_several_modules_find_their_own(tmp_path: Path) -> None:
    """Both call their parameters `weight` and `bias`; the states' shapes tell them apart."""
    parts, tuned = two_networks(3)
    loader = Keeps({"big": torch.arange(50_000), "at": (1, {2})})
    save(tmp_path / "c", parts, tuned, loader=loader, format="dcp")
    convert(tmp_path / "c", tmp_path / "ours")
    (others, again), other = two_networks(1), Keeps({})
    load(tmp_path / "ours", others, again, loader=other)
    assert torch.equal(other.kept["big"], loader.kept["big"])
    assert other.kept["at"] == (1, {2})
    for name, one in parts.items():
        assert torch.equal(one.weight, others[name].weight)
    for one, other in zip(tuned, again, strict=True):
        pairs = zip(one.state.values(), other.state.values(), strict=True)
        assert all(torch.equal(a["momentum_buffer"], b["momentum_buffer"]) for a, b in pairs)
        assert one.param_groups[0]["lr"] == other.param_groups[0]["lr"]


def test_modules_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    twins = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}
    tuned = torch.optim.SGD(twins["b"].parameters(), lr=0.5)
    save(tmp_path / "c", twins, tuned, format="dcp")
    with pytest.raises(CheckpointError, match="optimizer has parameters of names that 2 modules have"):
        convert(tmp_path / "c", tmp_path / "ours")

"""What torch saved is read onto any mesh, and nothing of it is executed."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
import xxhash
from torch import nn
from torch.distributed.fsdp import fully_shard

from shardwright.checkpoint import convert, load, save, save_hf, verify
from shardwright.cli.app import main
from shardwright.errors import CheckpointError
from shardwright.testing import rank_mesh
from tests.checkpoint.faults.hostile import Executes
from tests.checkpoint.programs import Setup, build, whole
from tests.checkpoint.test_save_load import LAYOUTS

Ranks = Callable[..., list[Any]]


def torch_saves(path: Path, nested: bool) -> dict[str, torch.Tensor]:
    """A model of fully_shard, by torch alone."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    wanted = {name: one.detach().clone() for name, one in model.state_dict().items()}
    fully_shard(model, mesh=rank_mesh((2,), ("dp",)))
    state = {"model": model.state_dict(), "step": 5} if nested else model.state_dict()
    torch_checkpoint.save(state, checkpoint_id=path)
    return wanted


@pytest.mark.parametrize("nested", [False, True])
def test_what_torchs_dcp_and_fsdp_wrote_is_loaded(ranks: Ranks, tmp_path: Path, nested: bool) -> None:
    wanted = ranks(2, torch_saves, tmp_path / "theirs", nested)[0]
    convert(tmp_path / "theirs", tmp_path / "ours")
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    load(tmp_path / "ours", model, only="model/*.*" if nested else None)
    assert all(torch.equal(one, wanted[name]) for name, one in model.state_dict().items())
    assert verify(tmp_path / "ours") > 0


def ours_to_dcp(path: Path, setup: Setup) -> dict[str, torch.Tensor]:
    model = build(setup, seed=1)
    state = {name: one.detach() for name, one in model.state_dict().items() if name not in {"empty", "head"}}
    torch_checkpoint.save(state, checkpoint_id=path)
    return {name: whole(one) for name, one in state.items()}


def test_boxes_of_placements_that_dcp_wrote_are_joined(ranks: Ranks, tmp_path: Path) -> None:
    wanted = ranks(4, ours_to_dcp, tmp_path / "theirs", LAYOUTS["several boxes"])[0]
    convert(tmp_path / "theirs", tmp_path / "ours", key=lambda name: name)
    found = {name: torch.zeros_like(one) for name, one in wanted.items()}
    load(tmp_path / "ours", **found)
    assert all(torch.equal(found[name], one) for name, one in wanted.items())


@pytest.mark.parametrize("inside", ["", "model"])
def test_a_file_of_torch_save_is_loaded(tmp_path: Path, inside: str, capsys: Any) -> None:
    model = nn.Linear(4, 3)
    state = model.state_dict()
    torch.save({inside: state} if inside else state, tmp_path / "theirs.pt")
    assert main(["checkpoint", "convert", str(tmp_path / "theirs.pt"), str(tmp_path / "ours")]) == 0
    other = nn.Linear(4, 3)
    load(tmp_path / "ours", other)
    assert torch.equal(other.weight, model.weight)
    assert "2 tensors" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["index", "file"])
def test_a_pickle_that_would_run_something_is_refused(ranks: Ranks, tmp_path: Path, where: str) -> None:
    mark = tmp_path / "executed"
    source = tmp_path / "theirs"
    if where == "index":
        source.mkdir()
        (source / ".metadata").write_bytes(pickle.dumps(Executes(mark)))
    else:
        torch.save({"weight": Executes(mark)}, source)
    with pytest.raises(CheckpointError, match="cannot be read"):
        convert(source, tmp_path / "ours")
    assert not mark.exists()
    assert not (tmp_path / "ours").exists()
    pickle.loads(pickle.dumps(Executes(mark)))  # it does run where nothing keeps it from running
    assert mark.exists()


@pytest.mark.parametrize(
    "name", ["os.system", "builtins.eval", "torch.load", "torch.hub.load", "pathlib.Path"]
)
def test_only_names_that_an_index_needs_are_known(tmp_path: Path, name: str) -> None:
    module, _, attribute = name.rpartition(".")
    (tmp_path / ".metadata").write_bytes(f"c{module}\n{attribute}\n(Vx\ntR.".encode())
    with pytest.raises(CheckpointError, match=f"it names {name}"):
        convert(tmp_path, tmp_path / "ours")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("manifest.json", "is a checkpoint of this library: `load` reads it"),
        ("checkpoints", "is the folder of a run: name one of its checkpoints"),
        ("model-00001-of-00002.safetensors", "`load_hf` reads them"),
        ("__0_0.distcp", "has no .metadata, which a save writes last"),
    ],
)
def test_a_folder_of_another_kind_is_named(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=words):
        convert(tmp_path, tmp_path / "ours")


def test_a_name_that_leads_out_is_refused(tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    torch_checkpoint.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    index = tmp_path / "theirs" / ".metadata"
    index.write_bytes(index.read_bytes().replace(b"__0_0.distcp", b"../_0.distcp"))
    with pytest.raises(CheckpointError, match="is no name of a file in the folder"):
        convert(tmp_path / "theirs", tmp_path / "ours")


def test_a_cut_file_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    torch_checkpoint.save({"weight": torch.ones(300)}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    data = next((tmp_path / "theirs").glob("*.distcp"))
    os.truncate(data, data.stat().st_size - 10)
    with pytest.raises(CheckpointError, match=data.name):
        convert(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("how", ["file", "folder"])
def test_a_value_that_torch_does_not_read_is_named_and_may_be_allowed(tmp_path: Path, how: str) -> None:
    """A number of numpy, which runs numpy's code where it is read: a user may trust that."""
    warnings.simplefilter("ignore")
    state, source = {"loss": np.float64(0.1), "model": {"w": torch.ones(3)}}, tmp_path / "theirs"
    if how == "file":
        torch.save(state, source)
    else:
        torch_checkpoint.save(state, checkpoint_id=source, no_dist=True)
    with pytest.raises(CheckpointError, match=r"Unsupported global.*add_safe_globals") as error:
        convert(source, tmp_path / "ours")
    assert ("loss (" in str(error.value)) == (how == "folder")
    scalar = np.float64(0).__reduce__()[0]
    with torch.serialization.safe_globals([scalar, np.dtype, np.dtypes.Float64DType]):
        convert(source, tmp_path / "ours")
    assert load(tmp_path / "ours", loss=None).values == {"loss": 0.1}


def first_format(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A checkpoint as version 1 wrote it: torch's storage and a manifest with a checksum of its JSON."""
    warnings.simplefilter("ignore")
    names = {id(one): name for name, one in model.named_parameters()}
    state = {f"model/{name}": one.detach() for name, one in model.named_parameters() if one.numel()}
    for parameter, of in optimizer.state.items():
        state |= {f"optimizer/{names[id(parameter)]}/{name}": one for name, one in of.items()}
    groups = [{**g, "params": [names[id(one)] for one in g["params"]]} for g in optimizer.param_groups]
    objects = {"settings/0123": {"values": {}, "groups": groups}, "extra": {"note": (1, 2)}}
    objects["rng/0"] = {"torch": torch.get_rng_state(), "cuda": None, "python": random.getstate()}
    planner = torch_checkpoint.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    torch_checkpoint.save({**state, **objects}, checkpoint_id=path, planner=planner, no_dist=True)
    tensors = {
        name: {"shape": list(one.shape), "dtype": str(one.dtype), "layout": None}
        for name, one in model.named_parameters()
    }
    body = {
        "format": "shardwright", "version": 1, "library": "0.1", "torch": "2", "world": 2, "step": 7,
        "config": {"lr": 0.5}, "model": tensors, "aliases": {"head": "weight"}, "objects": [],
        "optimizer": {"kind": type(optimizer).__name__, "state": {}}, "settings": ["0123"],
        "files": {one.name: {"size": 0, "checksum": ""} for one in path.iterdir()},
    }  # fmt: skip
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
    (path / "manifest.json").write_text(json.dumps({"checksum": checksum, "manifest": body}, indent=1))


def tied(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(4, 3))
    model.nothing = nn.Parameter(torch.randn(0, 3))
    model.head = model.weight
    optimizer = torch.optim.AdamW([model.weight], lr=0.1 * seed)
    model.weight.grad = torch.randn(4, 3)
    optimizer.step()
    return model, optimizer


def test_a_checkpoint_of_version_1_says_how_it_is_read_and_is(tmp_path: Path) -> None:
    model, optimizer = tied(3)
    first_format(tmp_path / "old", model, optimizer)
    other, tuned = tied(1)
    with pytest.raises(
        CheckpointError, match="it is of version 1, which is made of pickles: `shardwright check"
    ):
        load(tmp_path / "old", other, tuned)
    convert(tmp_path / "old", tmp_path / "new")
    loaded = load(tmp_path / "new", other, tuned)
    assert (loaded.step, loaded.extra, loaded.config) == (7, {"note": (1, 2)}, {"lr": 0.5})
    assert torch.equal(other.weight, model.weight)
    for name, one in optimizer.state[model.weight].items():
        assert torch.equal(tuned.state[other.weight][name], one)
    assert tuned.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_a_checkpoint_of_version_1_is_replaced_when_it_is_saved_over(tmp_path: Path) -> None:
    model, optimizer = tied(3)
    first_format(tmp_path / "c", model, optimizer)
    save(tmp_path / "c", model, optimizer)
    assert {one.name.split("-")[0] for one in (tmp_path / "c").iterdir()} == {"data", "manifest.json"}
    load(tmp_path / "c", *tied(1))


@pytest.mark.parametrize("how", ["file", "folder"])
def test_ties_of_others_are_loaded_onto_ties(tmp_path: Path, how: str) -> None:
    """They store a tied tensor by each of its names, and say nothing of it."""
    warnings.simplefilter("ignore")
    model, _ = tied(3)
    if how == "file":
        torch.save(model.state_dict(), tmp_path / "theirs")
    else:
        torch_checkpoint.save(model.state_dict(), checkpoint_id=tmp_path / "theirs", no_dist=True)
    convert(tmp_path / "theirs", tmp_path / "ours")
    other, _ = tied(1)
    load(tmp_path / "ours", other)
    assert torch.equal(other.weight, model.weight)
    assert other.head is other.weight


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    """To open a pipe waits for whoever writes into it."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="is no regular file"):
        convert(tmp_path / "pipe", tmp_path / "ours")


def test_two_things_that_read_alike_are_refused(tmp_path: Path) -> None:
    """One of them had been lost."""
    torch.save({0: torch.ones(2), "0": torch.zeros(3)}, tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="two things are called 0, one of them by a number"):
        convert(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_torchs_first_file_format_is_read(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "theirs", _use_new_zipfile_serialization=False)
    convert(tmp_path / "theirs", tmp_path / "ours")
    other = nn.Linear(3, 2)
    load(tmp_path / "ours", other)
    assert torch.equal(other.weight, model.weight)


def test_a_module_in_a_file_is_named(tmp_path: Path) -> None:
    torch.save(nn.Linear(3, 2), tmp_path / "theirs")
    with pytest.raises(CheckpointError, match=r"save the state_dict\(\)\): .*torch.nn.modules.linear.Linear"):
        convert(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize("target", ["file", "file/below", "broken"])
def test_a_place_that_takes_no_checkpoint_is_one_error(tmp_path: Path, target: str) -> None:
    """The words of every function that writes: the system's own had been inside of them."""
    torch.save({"a": torch.ones(1)}, tmp_path / "file")
    (tmp_path / "broken").symlink_to("nowhere")
    model, place = nn.Linear(2, 2), tmp_path / target
    taken = tmp_path / target.partition("/")[0]
    why = "a link to what is not there" if target == "broken" else "no folder"
    for write in (
        lambda: convert(tmp_path / "file", place),
        lambda: save(place, model),
        lambda: save(place, model, format="dcp"),
        lambda: save_hf(model, place),
    ):
        with pytest.raises(CheckpointError) as told:
            write()
        assert str(told.value) == f"nothing can be written to {place}: {taken} is {why}; name another folder"
    assert torch.load(tmp_path / "file")["a"] == 1


@pytest.mark.parametrize(
    "thing", [torch.ones(2), torch.ones(70_000), {"a": torch.ones(2)}, {"a": 1}, 5, None]
)
def test_what_others_call_rng_and_extra_is_kept(tmp_path: Path, thing: Any) -> None:
    """A checkpoint with the generators of another program could not be loaded, and tensors were lost."""
    model = nn.Linear(2, 2)
    torch.save({"model": model.state_dict(), "rng": thing, "extra": thing}, tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    state = copy.deepcopy(thing)
    loaded = load(tmp_path / "ours", nn.Linear(2, 2), **{"rng~": state})
    assert str(loaded.extra) == str(thing)
    assert not loaded.rng_restored


class Keeping(torch.optim.SGD):
    """It keeps something that is of no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["own"] = torch.arange(3)
        self.state["count"] = 7
        return super().step(closure)


def test_what_an_optimizer_keeps_for_no_parameter_is_converted(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = Keeping(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "one.pt")
    convert(tmp_path / "one.pt", tmp_path / "c", parameters=["weight", "bias"])
    tuned = Keeping(other.parameters())
    load(tmp_path / "c", other, tuned)
    assert tuned.state["count"] == 7
    assert torch.equal(tuned.state["own"], torch.arange(3))
    buffers = [one.state[of.weight]["momentum_buffer"] for one, of in ((optimizer, model), (tuned, other))]
    assert torch.equal(*buffers)


@pytest.mark.parametrize("kind", ["sparse", "nested", "meta"])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 says so whenever it reads one
def test_a_tensor_without_elements_of_its_own_is_named(tmp_path: Path, kind: str) -> None:
    with warnings.catch_warnings(action="ignore"):
        nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    made = {"sparse": torch.eye(2).to_sparse(), "nested": nested, "meta": torch.empty(2, device="meta")}
    torch.save({"model": {"fine": torch.ones(1), "a": {"b": made[kind]}}}, tmp_path / "one.pt")
    with pytest.raises(CheckpointError, match=f"(model.a.b is .*|_rebuild_){kind}"):
        convert(tmp_path / "one.pt", tmp_path / "c")
    assert not (tmp_path / "c").exists()


class Counted(nn.Module):
    """Its extra state is what it is given."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.weight, self.held = nn.Parameter(torch.ones(3)), held

    def get_extra_state(self) -> Any:
        return self.held

    def set_extra_state(self, state: Any) -> None:
        self.held = state


@pytest.mark.parametrize("how", ["file", "dcp", "ours"])
@pytest.mark.parametrize("held", [{"n": 4, "t": torch.arange(3)}, {"n": 4}, torch.arange(3), [1, 2]])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_extra_state_is_one_value(tmp_path: Path, held: Any, how: str) -> None:
    """Formats of torch take it apart as they do a dict of tensors, and no module took it back."""
    model = nn.Sequential(Counted(held))
    if how == "file":
        torch.save({"model": model.state_dict()}, tmp_path / "theirs")
    elif how == "dcp":
        torch_checkpoint.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "theirs")
    else:
        save(tmp_path / "theirs", model, format="dcp")
    other = nn.Sequential(Counted(None))
    load(convert(tmp_path / "theirs", tmp_path / "ours"), other)
    torch.testing.assert_close(other[0].held, held, rtol=0, atol=0)


def _two() -> tuple[dict[str, nn.Module], list[torch.optim.Optimizer]]:
    modules = {"g": nn.Linear(2, 2), "d": nn.Linear(2, 2)}
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(one.parameters()) for one in modules.values()]
    for factor, one, optimizer in zip((1, 2), modules.values(), optimizers, strict=True):
        (factor * one(torch.ones(2)).sum()).backward()
        optimizer.step()
    return modules, optimizers


@pytest.mark.parametrize("how", ["ours", "by number"])
def test_of_two_optimizers_it_is_said_which_module_is_whose(tmp_path: Path, how: str) -> None:
    modules, optimizers = _two()
    said: dict[str, Any]
    if how == "ours":
        save(tmp_path / "theirs", modules, optimizers, format="dcp")
        said = {"optimizer.0": "model.g", "optimizer.1": "model.d"}
        with pytest.raises(CheckpointError, match=r"parameters=\{'optimizer.0': 'model.g'\} says it"):
            convert(tmp_path / "theirs", tmp_path / "ours")
    else:
        told = {name: one.state_dict() for name, one in modules.items()}
        torch.save(
            {"model": told, "optimizer": [one.state_dict() for one in optimizers]}, tmp_path / "theirs"
        )
        said = {f"optimizer.{n}": [f"{name}.weight", f"{name}.bias"] for n, name in enumerate(modules)}
    with pytest.raises(CheckpointError, match="speaks of 'other', which is no optimizer"):
        convert(tmp_path / "theirs", tmp_path / "ours", parameters={"other": "g"})
    convert(tmp_path / "theirs", tmp_path / "ours", parameters=said)
    others, fresh = _two()
    load(tmp_path / "ours", others, fresh)
    for mine, theirs in zip(fresh, optimizers, strict=True):
        for place, state in theirs.state_dict()["state"].items():
            assert torch.equal(mine.state_dict()["state"][place]["exp_avg"], state["exp_avg"])


def test_names_of_parameters_without_an_optimizer_are_refused(tmp_path: Path) -> None:
    torch.save({"model": nn.Linear(2, 2).state_dict()}, tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="holds no optimizer that knows its parameters by number"):
        convert(tmp_path / "theirs", tmp_path / "ours", parameters=["weight", "bias"])


def test_a_part_of_a_value_says_where_it_is(tmp_path: Path) -> None:
    torch.save({"model": nn.Linear(2, 2).state_dict(), "list": [torch.ones(2), 3]}, tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    with pytest.raises(CheckpointError, match="list/0 is not in the checkpoint by itself: list is there"):
        load(tmp_path / "ours", nn.Linear(2, 2), list=[torch.ones(2), 0])

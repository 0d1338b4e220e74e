"""Any state, nested: modules, several optimizers by parameter name, schedulers, generators, values."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright import Shard, distribute_tensor
from shardwright.checkpoint import latest, list_checkpoints, load, prune, read_manifest, save, step_path
from shardwright.checkpoint.storage.stores.local import lock
from shardwright.errors import CheckpointError
from shardwright.testing import rank_mesh
from tests.checkpoint.faults.inject import failing

Ranks = Callable[..., list[Any]]


class Loader:
    """A data loader as it saves itself."""

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.order = torch.arange(5) + at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": self.order, "shards": ("a", 1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.order = state["at"], state["order"]
        assert state["shards"] == ("a", 1)


def gan(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    parts = {"generator": nn.Linear(3, 4), "critic": nn.Linear(4, 1)}
    tuned = [torch.optim.AdamW(parts["generator"].parameters(), lr=0.1 * seed)]
    tuned += [torch.optim.SGD(parts["critic"].parameters(), lr=0.2, momentum=0.9)]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(seed):
        for one in tuned:
            one.zero_grad()
        parts["critic"](parts["generator"](torch.randn(5, 3))).sum().backward()
        for one in tuned:
            one.step()
    schedules = [torch.optim.lr_scheduler.StepLR(one, 2) for one in tuned]
    return {
        "model": parts,
        "optimizer": tuned,
        "schedule": schedules,
        "noise": generator,
        "loader": Loader(seed),
        "best": {"loss": 1.5 * seed, "at": [seed, None]},
        "table": torch.full((3,), float(seed)),
    }


def told(state: dict[str, Any]) -> list[Any]:
    """All that a state is, by plain torch."""
    found: list[Any] = [one.state_dict() for one in state["model"].values()]
    found += [one.state_dict() for one in (*state["optimizer"], *state["schedule"])]
    return [*found, state["noise"].get_state(), state["loader"].__dict__, state["table"]]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def test_a_nested_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state, other = gan(3), gan(1)
    save(tmp_path / "c", **state)
    assert not equal(told(state), told(other))
    loaded = load(tmp_path / "c", **other)
    assert equal(told(state), told(other))
    assert loaded.values == {"best": state["best"]}


def test_several_optimizers_may_be_a_list(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    tuned = [torch.optim.SGD([model.weight], lr=1), torch.optim.SGD([model.bias], lr=2)]
    save(tmp_path / "c", model, tuned)
    load(tmp_path / "c", model, [torch.optim.SGD([model.weight]), torch.optim.SGD([model.bias])])
    assert list(read_manifest(tmp_path / "c").optimizers) == ["optimizer/0", "optimizer/1"]


@pytest.mark.parametrize("critic", ["model/critic/*", "model/critic", "*/cri*"])
def test_a_part_of_a_checkpoint_is_loaded_by_pattern(tmp_path: Path, critic: str) -> None:
    state, other = gan(3), gan(1)
    before = told(gan(1))
    save(tmp_path / "c", **state)
    load(tmp_path / "c", **other, only=[critic, "noise"])
    after = told(other)
    assert equal(after[1], state["model"]["critic"].state_dict())
    assert equal(after[-3], state["noise"].get_state())
    assert equal([after[0], *after[2:4], after[-1]], [before[0], *before[2:4], before[-1]])


def test_in_place_gives_the_same(tmp_path: Path) -> None:
    state, other = gan(3), gan(3)
    save(tmp_path / "c", **state)
    for one in other["model"].values():
        nn.init.zeros_(one.weight)
    places = [one.data_ptr() for part in other["model"].values() for one in part.parameters()]
    load(tmp_path / "c", **other, in_place=True)
    assert equal(told(state), told(other))
    assert places == [one.data_ptr() for part in other["model"].values() for one in part.parameters()]


VALUES: list[Any] = [
    None, True, 3, -(1 << 200), 0.1, "text\u2028\"\\", b"\x00\xff", 1 + 2j, (1, (2, [3])), {1: "a", (2, 3):
    "b"}, {"$": "tagged"}, {"a": {"$": [{"$": 1}]}}, OrderedDict(b=1, a=2), {1, 2}, frozenset({"x"}),
    torch.Size([2, 3]),
    torch.bfloat16, torch.device("cpu"), np.float32(1.5), np.arange(6).reshape(2, 3), Path("a/b"),
    bytearray(b"x"),
    torch.arange(3), torch.ones(2, dtype=torch.bfloat16), torch.ones(0, 3), torch.tensor(1 + 1j), [], {}, (),
    torch.arange(50_000), Counter({3: 2, "a": 1}), deque([1, torch.Size([2])], maxlen=4), deque(),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=[f"{type(v).__name__}{n}" for n, v in enumerate(VALUES)])
def test_plain_values_come_back_with_their_types(tmp_path: Path, value: Any) -> None:
    save(tmp_path / "c", nn.Linear(1, 1), extra={"here": value})
    found = load(tmp_path / "c", nn.Linear(1, 1)).extra["here"]
    assert type(found) is type(value) or isinstance(value, Path)
    if isinstance(value, torch.Tensor | np.ndarray):
        assert found.dtype == value.dtype
        assert found.shape == value.shape
        assert (found == value).all()
    else:
        assert found == value


def test_none_is_a_plain_value_and_asks_for_one(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    save(tmp_path / "c", model, best=None, epoch=3)
    found = load(tmp_path / "c", model, best=0.5, epoch=None, absent=None)
    assert found.values == {"best": None, "epoch": 3}
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters(), lr=1))
    with pytest.raises(CheckpointError, match="best has a state here, and was None when it was saved"):
        load(tmp_path / "c", model, best=scheduler)
    assert torch.equal(model.weight, before + 1)
    load(tmp_path / "c", model, best=Stateless())
    assert torch.equal(model.weight, before)


def test_what_stands_where_a_value_or_a_tensor_was_looked_for_is_named(tmp_path: Path) -> None:
    save(tmp_path / "c", run={"ema": torch.ones(2), "seen": 3}, best=0.5)
    with pytest.raises(CheckpointError, match="run is not in the checkpoint as a value: it holds run/ema "):
        load(tmp_path / "c", run={})
    with pytest.raises(CheckpointError, match="best is not in the checkpoint as a tensor: it is a value"):
        load(tmp_path / "c", best=torch.ones(1))
    assert load(tmp_path / "c", run={"ema": torch.zeros(2), "seen": 0}).values == {"run/seen": 3}


class Stateless:
    """It has nothing to say: its state is None, and comes back."""

    def state_dict(self) -> None:
        return None

    def load_state_dict(self, state: Any) -> None:
        assert state is None


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_numbers_that_json_does_not_have_come_back(tmp_path: Path, value: float) -> None:
    save(tmp_path / "c", nn.Linear(1, 1), extra=value)
    assert repr(load(tmp_path / "c", nn.Linear(1, 1)).extra) == repr(value)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (object(), "extra is a builtins.object, which could only be pickled"),
        ({"a": [print]}, "extra/a/0 is a builtins.builtin_function_or_method"),
        (np.array([object()]), "extra is a numpy.ndarray"),
    ],
)
def test_what_could_only_be_pickled_is_refused_by_name(tmp_path: Path, extra: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        save(tmp_path / "c", nn.Linear(1, 1), extra=extra)
    assert not (tmp_path / "c").exists()


def test_a_value_inside_itself_is_refused(tmp_path: Path) -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(CheckpointError, match="inside itself"):
        save(tmp_path / "c", nn.Linear(1, 1), extra=value)
    with pytest.raises(CheckpointError, match="inside itself"):
        save(tmp_path / "c", nn.Linear(1, 1), more=[nn.Linear(1, 1), value])


class TestRanks:
    """What differs between ranks is never silently one rank's."""

    def test_a_plain_tensor_that_differs_is_refused_by_name(self, ranks: Ranks, tmp_path: Path) -> None:
        found = ranks(2, differing_buffer, tmp_path / "c")
        assert found[0] == found[1]
        assert "model/running_mean is a plain tensor whose values differ between ranks 0 and 1" in found[0]
        assert not (tmp_path / "c").exists()

    def test_a_value_that_differs_is_kept_for_each_rank(self, ranks: Ranks, tmp_path: Path) -> None:
        assert ranks(2, own_loader, tmp_path / "c") == [10, 11]
        assert "loader was saved by each of 2 ranks for itself" in ranks(1, other_world, tmp_path / "c")[0]

    def test_a_disk_of_one_node_is_noticed_before_the_commit(self, ranks: Ranks, tmp_path: Path) -> None:
        found = ranks(2, save_on_own_disk, tmp_path, False)
        assert found[0] == found[1]
        assert "rank 1 does not see" in found[0]
        found = ranks(2, save_on_own_disk, tmp_path, True)
        assert "the ranks do not share this file system" in found[0]
        assert not list(tmp_path.glob("*/c/data-*"))

    def test_a_replicated_tensor_is_written_once_and_by_all(self, ranks: Ranks, tmp_path: Path) -> None:
        """A large one is cut between those who hold it; small ones are dealt out."""
        ranks(4, save_replicated, tmp_path / "c")
        manifest = read_manifest(tmp_path / "c")
        sizes = [file.size for file in manifest.files]
        assert sum(sizes) < 1.01 * (8 << 20)
        assert max(sizes) < 1.05 * min(sizes)
        assert len(manifest.tensors["model/large"].parts) == 4
        model = nn.Module()
        model.large = nn.Parameter(torch.zeros(1024, 2048))
        load(tmp_path / "c", model)
        assert torch.equal(model.large, torch.arange(float(2 << 20)).reshape(1024, 2048))

    def test_ranks_that_see_different_checkpoints_are_told(self, ranks: Ranks, tmp_path: Path) -> None:
        for name in ("r0", "r1"):
            save(tmp_path / name / "c", nn.Linear(1, 1))
        assert "the ranks see different checkpoints" in ranks(2, load_own, tmp_path)[0]


def differing_buffer(path: Path) -> str:
    model = nn.BatchNorm1d(2)
    model.running_mean += dist.get_rank()
    with pytest.raises(CheckpointError) as error:
        save(path, model)
    return str(error.value)


def own_loader(path: Path) -> int:
    save(path, loader=Loader(10 + dist.get_rank()))
    loader = Loader()
    load(path, loader=loader)
    return loader.at


def other_world(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        load(path, loader=Loader())
    return str(error.value)


def save_on_own_disk(folder: Path, exists: bool) -> str:
    own = folder / f"node{dist.get_rank()}" / "c"
    if exists:
        own.mkdir(parents=True, exist_ok=True)
    with pytest.raises(CheckpointError) as error:
        save(own, nn.BatchNorm1d(2))
    return re.sub(r"node\d", "node", str(error.value))


def save_replicated(path: Path) -> None:
    mesh = rank_mesh((4,), ("dp",))
    model = nn.Module()
    whole = torch.arange(float(2 << 20)).reshape(1024, 2048)
    model.large = nn.Parameter(distribute_tensor(whole, mesh, {}, src_data_rank=None))
    save(path, model)


def load_own(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        load(folder / f"r{dist.get_rank()}" / "c", nn.Linear(1, 1))
    return str(error.value)


def load_where_one_sees_damage(path: Path) -> tuple[bool, bool]:
    """Whether it is refused, and the model is as it was; the last byte is read by the last rank alone."""
    mesh = rank_mesh((2,), ("dp",))
    model = nn.Module()
    zeros = distribute_tensor(torch.zeros(300, 2000), mesh, {"dp": Shard(0)}, src_data_rank=None)
    model.weight = nn.Parameter(zeros)
    with pytest.raises(CheckpointError) as error:
        load(path, model)
    return "wrong checksum" in str(error.value), bool((model.weight.to_local() == 0).all())


def test_a_rank_whose_own_part_is_right_changes_nothing_either(ranks: Ranks, tmp_path: Path) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(300, 2000))
    save(tmp_path / "c", model)
    data = next((tmp_path / "c").glob("data-*"))
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    assert ranks(2, load_where_one_sees_damage, tmp_path / "c") == [(True, True)] * 2


def test_data_of_a_damaged_manifest_stays_until_another_one_is_committed(tmp_path: Path) -> None:
    """A person may still save it by hand; a save that fails must not take that away."""
    save(tmp_path / "c", nn.Linear(1, 1))
    manifest = tmp_path / "c" / "manifest.json"
    manifest.write_text(manifest.read_text()[:-20])
    before = {one.name for one in (tmp_path / "c").iterdir()}
    with failing(tmp_path, 1, errno.EIO, names=("rename",)), pytest.raises(CheckpointError):
        save(tmp_path / "c", nn.Linear(1, 1))
    assert {one.name for one in (tmp_path / "c").iterdir()} == before
    save(tmp_path / "c", nn.Linear(1, 1))
    assert not before & {one.name for one in (tmp_path / "c").iterdir()} - {"manifest.json"}


def test_a_path_that_is_being_written_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "c", nn.Linear(1, 1))
    handle = lock(tmp_path / "c")
    with pytest.raises(CheckpointError, match="is being written by another process"):
        save(tmp_path / "c", nn.Linear(1, 1))
    os.close(handle)
    save(tmp_path / "c", nn.Linear(1, 1))


def test_without_locks_a_save_warns_and_removes_only_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another save may be writing stays: its journal and its data."""

    def no_locks(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    save(tmp_path / "c", nn.Linear(1, 1))
    other = "0123456789abcdef"
    journal = tmp_path / "c" / f"saving-{other}.json"
    journal.write_text(json.dumps({"format": "shardwright save", "id": other, "replaces": []}))
    data = tmp_path / "c" / f"data-{other}-00000-000.safetensors"
    data.write_bytes(b"half of it")
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.warns(UserWarning, match="this file system has no locks"):
        save(tmp_path / "c", nn.Linear(1, 1))
    assert len(list((tmp_path / "c").iterdir())) == 4
    assert data.exists()
    monkeypatch.undo()
    save(tmp_path / "c", nn.Linear(1, 1))
    assert len(list((tmp_path / "c").iterdir())) == 2


def test_pruning_keeps_the_last_and_every_so_many(tmp_path: Path) -> None:
    for step in range(1, 8):
        save(step_path(tmp_path, step), nn.Linear(1, 1), step=step)
    removed = prune(tmp_path, keep=2, every=3)
    kept = [int(path.name[5:]) for path in list_checkpoints(tmp_path).committed]
    assert kept == [7, 6, 3]
    assert len(removed) == 4
    assert latest(tmp_path) == latest(tmp_path / "checkpoints") == step_path(tmp_path, 7)


def load_slices(path: Path, dim: int) -> tuple[int, bool]:
    mesh = rank_mesh((2,), ("dp",))
    model = nn.Module()
    whole = torch.arange(300.0 * 2000).reshape(300, 2000)
    zeros = distribute_tensor(torch.zeros_like(whole), mesh, {"dp": Shard(dim)}, src_data_rank=None)
    model.weight = nn.Parameter(zeros)
    read = load(path, model).bytes_read
    return read, torch.equal(model.weight.full_tensor(), whole)


@pytest.mark.parametrize(("dim", "most"), [(0, 1.25), (1, 2.0)])
def test_a_rank_reads_its_part_to_whole_chunks(ranks: Ranks, tmp_path: Path, dim: int, most: float) -> None:
    """A cut of columns this narrow is read with what lies between: 2.4 MB in all."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.arange(300.0 * 2000).reshape(300, 2000))
    save(tmp_path / "c", model)
    for read, right in ranks(2, load_slices, tmp_path / "c", dim):
        assert right
        assert read <= most * 300 * 2000 * 4 / 2 + 30_000


def test_values_are_refused_by_name_or_exact(tmp_path: Path) -> None:
    values = {"here": Path("/x"), "pure": PurePosixPath("a"), "text": "ü\u2603", "bytes": b"\xff"}
    save(tmp_path / "c", values=values)
    found = load(tmp_path / "c", values={}).values["values"]
    assert found == values
    assert [type(one) for one in found.values()] == [type(one) for one in values.values()]
    for name, value in (("far", PureWindowsPath("a")), ("half", "\ud800")):
        with pytest.raises(CheckpointError, match=name):
            save(tmp_path / "c", **{name: value})
    with pytest.raises(CheckpointError, match="half of a character"):
        save(tmp_path / "c", tensors={"\ud800": torch.ones(1)})
    assert load(tmp_path / "c", values={}).values["values"] == values


class _OfAUser(np.ndarray):
    """An array that may say more than its elements."""


@pytest.mark.parametrize("value", [np.ma.masked_array([1, 2], [True, False]), np.ones(2).view(_OfAUser)])
def test_arrays_that_are_more_than_their_elements_are_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="could only be pickled"):
        save(tmp_path / "c", extra=value)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("make", [torch.Tensor.conj, lambda x: x.conj().imag])
def test_conjugates_are_saved_and_loaded(make: Callable[..., torch.Tensor], tmp_path: Path) -> None:
    numbers = torch.randn(4, dtype=torch.complex64)
    save(tmp_path / "c", extra=make(numbers), x={"y": make(numbers)})
    for in_place in (False, True):
        target = make(torch.zeros(4, dtype=torch.complex64))
        loaded = load(tmp_path / "c", x={"y": target}, in_place=in_place)
        assert torch.equal(target, make(numbers))
        assert torch.equal(loaded.extra, make(numbers))

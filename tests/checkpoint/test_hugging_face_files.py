"""The files that an export writes: by which rank, in which order, and of which elements."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from shardwright import Shard, distribute_module
from shardwright.checkpoint import load_hf, rename, save_hf
from shardwright.checkpoint.storage import disk
from shardwright.errors import CheckpointError
from shardwright.parallel import parallelize_fsdp, parallelize_pipeline, parallelize_replicate
from shardwright.testing import rank_mesh
from tests.checkpoint.faults.inject import no_locks

Ranks = Callable[..., list[Any]]


class Staged(nn.Module):
    """Three layers, one of them with a buffer of odd size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("odd", torch.tensor([True, False, True]))
        self.register_buffer("wide", torch.arange(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def export_stages(folder: Path) -> None:
    mesh = rank_mesh((2, 2), ("pp", "dp"))
    torch.manual_seed(5)
    model = Staged()
    parallelize_pipeline(model, mesh["pp"], ["layers.2"])
    save_hf(parallelize_fsdp(model, mesh["dp"]), folder)


def test_stages_of_a_pipeline_are_exported_whole(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, export_stages, tmp_path / "out")
    torch.manual_seed(5)
    wanted, found = Staged().state_dict(), {}
    for file in sorted((tmp_path / "out").glob("*.safetensors")):
        found |= load_file(file)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], one) for name, one in wanted.items())


def test_wide_elements_come_first(tmp_path: Path) -> None:
    """Behind three bytes no number of eight could be read where it lies."""
    save_hf(Staged(), tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(one.data_ptr() % one.element_size() == 0 for one in found.values())


def test_a_type_of_elements_that_is_not_known_stops_only_whoever_asks_for_it(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_hf(model, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    end = max(one["data_offsets"][1] for name, one in header.items() if name != "__metadata__")
    header["scale"] = {"dtype": "F8_E8M0", "shape": [3], "data_offsets": [end, end + 3]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :] + b"abc")
    assert load_hf(model, tmp_path / "out").unused == ("scale",)
    model.register_buffer("scale", torch.zeros(3))
    with pytest.raises(CheckpointError, match="scale has elements of type 'F8_E8M0', which are not known"):
        load_hf(model, tmp_path / "out")
    text = text.replace(b"F8_E8M0", b"F8_E8M0" * 1000)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :] + b"abc")
    with pytest.raises(CheckpointError, match=r"has elements of type 'F8_E8M0.{1,60}, which are not known"):
        load_hf(model, tmp_path / "out")


def export_drifted(folder: Path) -> str:
    """Copies of one parameter that are not alike: the file had those of whichever rank wrote it."""
    mesh = rank_mesh((2,), ("dp",))
    model = parallelize_replicate(nn.Linear(2, 2), mesh)
    with torch.no_grad():
        model.bias.to_local().fill_(dist.get_rank())
    with pytest.raises(CheckpointError, match="bias differs between ranks") as error:
        save_hf(model, folder)
    return str(error.value)


def load_by_other_maps(folder: Path) -> str:
    model = parallelize_replicate(nn.Linear(2, 2), rank_mesh((2,), ("dp",)))
    before = model.weight.to_local().clone()
    with pytest.raises(CheckpointError, match="makes weight of other tensors on some ranks") as error:
        load_hf(model, folder, maps=rename("weight", "ab"[dist.get_rank()]))
    assert torch.equal(model.weight.to_local(), before)
    return str(error.value)


def test_copies_are_alike_and_so_are_maps(ranks: Ranks, tmp_path: Path) -> None:
    assert len(set(ranks(2, export_drifted, tmp_path / "out"))) == 1
    assert not (tmp_path / "out").exists()
    model = nn.Module()
    for name, shape in (("a", (2, 2)), ("b", (2, 2)), ("bias", (2,))):
        model.register_buffer(name, torch.randn(shape))
    save_hf(model, tmp_path / "in")
    assert len(set(ranks(2, load_by_other_maps, tmp_path / "in"))) == 1


class Tied(nn.Module):
    """An embedding that is its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight


def load_both_names(folder: Path) -> list[str]:
    """The last row, where the second folder has two values, is on one rank alone."""
    model = distribute_module(Tied(), rank_mesh((2,), ("tp",)), {"embedding.weight": {"tp": Shard(0)}})
    assert load_hf(model, folder / "alike").unused == ()
    wanted = load_file(folder / "alike" / "model.safetensors")["head.weight"]
    with pytest.raises(CheckpointError, match=r"embedding\.weight and head\.weight have different") as error:
        load_hf(model, folder / "apart")
    assert torch.equal(model.head.weight.full_tensor(), wanted)
    return [str(error.value)]


def test_a_tied_tensor_that_files_hold_twice_is_the_same_there(ranks: Ranks, tmp_path: Path) -> None:
    """Which of two values a model has would go by the order of its modules."""
    one = torch.randn(4, 3)
    other = one.clone()
    other[-1, -1] += 1
    for name, head in (("alike", one.clone()), ("apart", other)):
        (tmp_path / name).mkdir()
        save_file({"embedding.weight": one, "head.weight": head}, tmp_path / name / "model.safetensors")
    first, second = ranks(2, load_both_names, tmp_path)
    assert first == second


@pytest.mark.filterwarnings("ignore:this file system has no locks")
@pytest.mark.parametrize("lock", [disk.lock_folder, no_locks], ids=["locks", "no locks"])
def test_an_index_that_the_disk_refuses_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: Callable[[Path], Any]
) -> None:
    """The files had their names by then, and the next export was refused for them."""
    with monkeypatch.context() as full:
        full.setattr(disk, "lock_folder", lock)
        full.setattr(os, "writev", partial(_refused_if_small, os.writev))
        with pytest.raises(CheckpointError, match="No space left"):
            save_hf(nn.Linear(64, 64), tmp_path / "out", max_shard_size=1000)
    assert not (tmp_path / "out").exists()
    save_hf(nn.Linear(64, 64), tmp_path / "out", max_shard_size=1000)


def _refused_if_small(write: Any, handle: int, pieces: list[Any]) -> int:
    if b"weight_map" in bytes(pieces[0]):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return int(write(handle, pieces))

"""Two things of one name, on two ranks or on one, are refused by that name, or are the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwright.checkpoint import async_save, load, load_hf, read_manifest, save, save_hf
from shardwright.checkpoint.hugging_face import export
from shardwright.checkpoint.hugging_face.maps import Link
from shardwright.errors import CheckpointError
from shardwright.testing import rank_mesh

Ranks = Callable[..., list[Any]]


def refusal(path: Path, *args: Any, **state: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        save(path, *args, **state)
    return str(error.value)


def on_own_mesh(value: float) -> nn.Module:
    """A weight on this rank's mesh: ranks 0 and 1, or 2 and 3."""
    meshes = [DeviceMesh("cpu", [2 * n, 2 * n + 1], mesh_dim_names=("tp",)) for n in range(2)]
    local = torch.full((2, 3), value + dist.get_rank() % 2)
    model = nn.Module()
    model.w = nn.Parameter(DTensor.from_local(local, meshes[dist.get_rank() // 2], [Shard(0)]))
    return model


def two_stages(path: Path) -> str:
    return refusal(path, on_own_mesh(float(dist.get_rank() // 2)))


def two_replicas(path: Path) -> bool:
    save(path, on_own_mesh(3.0))
    model = on_own_mesh(0.0)
    load(path, model)
    return torch.equal(model.w.to_local(), torch.full((2, 3), 3.0 + dist.get_rank() % 2))


def replicas(path: Path, drifted: bool) -> str:
    """Copies of a half each, on ranks (0, 2) and (1, 3); those of the second pair are alike or not."""
    mesh = rank_mesh((2, 2), ("rep", "tp"))
    local = torch.arange(6.0).reshape(2, 3) + dist.get_rank() % 2
    if drifted and dist.get_rank() == 3:
        local[1, 1] += 1e-6
    x = DTensor.from_local(local, mesh, [Replicate(), Shard(0)])
    if drifted:
        return refusal(path, t=x)
    save(path, t=x)
    return ""


def views_fail_on_one(path: Path) -> str:
    module = sys.modules["shardwright.checkpoint.job"]
    if dist.get_rank() == 1:
        module.views = _no_memory
    model = nn.Module()
    mesh = rank_mesh((2,), ("dp",))
    model.w = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)]))
    return refusal(path, model)


def _no_memory(*_: Any, **__: Any) -> None:
    raise MemoryError("no room for a view")


def reordered(path: Path) -> Any:
    """The same values, their dicts and sets made in another order on each rank."""
    names = ["a", "b", "c"] if dist.get_rank() else ["c", "b", "a"]
    # The two sets give their elements in another order, for 0 and 8 want one place.
    told = {(name, 1): {0, 8} if dist.get_rank() else {8, 0} for name in names}
    save(path, told=told, plain=dict.fromkeys(names, 1))
    return read_manifest(path).values["told"]


def optimizer_values(path: Path) -> str:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight] = {"same": 1, "mine": dist.get_rank()}
    return refusal(path, model, optimizer)


def of_two_functions(folder: Path) -> dict[str, str]:
    """Each rank calls another function, or the same in another format; then both save."""
    model = nn.Linear(2, 2)
    save(folder / "old", model)
    save_hf(model, folder / "hf")
    calls: dict[str, Callable[[Path], object]] = {
        "save": lambda path: save(path, model),
        "dcp": lambda path: save(path, model, format="dcp"),
        "unknown": lambda path: save(path, model, format="pt"),  # type: ignore[arg-type]
        "async": lambda path: async_save(path, model).wait(),
        "hf": lambda path: save_hf(model, path),
        "load": lambda _: load(folder / "old", model),
        "load hf": lambda _: load_hf(model, folder / "hf"),
    }
    told: dict[str, str] = {}
    for first, second in (
        ("save", "dcp"), ("dcp", "async"), ("save", "hf"), ("dcp", "hf"), ("load", "save"),
        ("load hf", "load"), ("save", "async"), ("unknown", "save"), ("unknown", "load"),
    ):  # fmt: skip
        path = folder / f"{first}, {second}"
        with pytest.raises(CheckpointError) as error:
            calls[second if dist.get_rank() else first](path)
        told[path.name] = str(error.value)
        dist.barrier()
        assert not path.exists() or not [*path.iterdir()], path
        save(folder / f"after {path.name}", model)
    return told


def test_ranks_that_call_other_functions_are_told_of_it(ranks: Ranks, tmp_path: Path) -> None:
    told, other = ranks(2, of_two_functions, tmp_path)
    assert told == other
    for name, text in told.items():
        both = "rank 0 is " in text and "and rank 1 is " in text and "every rank calls the same" in text
        assert both != (name == "unknown, save"), (name, text)
        assert ("format='pt' is not known" in text) == ("unknown" in name), (name, text)


def test_tensors_of_one_name_on_two_meshes_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(4, two_stages, tmp_path / "c")
    assert len(set(found)) == 1
    assert "model/w is another tensor on the mesh of ranks [0, 1] than on that of [2, 3]" in found[0]


def test_copies_on_two_meshes_are_one_tensor(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(4, two_replicas, tmp_path / "c") == [True] * 4


def test_copies_that_differ_are_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(4, replicas, tmp_path / "c", True)
    assert len(set(found)) == 1
    assert "t is laid out as f32[4@tp, 3]" in found[0]
    assert "ranks 1 and 3 should hold the same elements, but they hold different ones" in found[0]
    assert not (tmp_path / "c").exists()
    assert ranks(4, replicas, tmp_path / "c", False) == [""] * 4


def test_a_failure_after_the_plan_is_told_to_all(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(2, views_fail_on_one, tmp_path / "c", fresh=True)
    assert found[0] == found[1]
    assert "failed on rank 1: MemoryError: no room for a view" in found[0]


class NoWordsError(Exception):
    """Its text is no text: a slip that many classes of errors have."""

    def __str__(self) -> str:
        return self.args[0]


class Fails:
    def state_dict(self) -> dict[str, int]:
        if dist.get_rank() == 1:
            raise NoWordsError(None)
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing to take."""


def without_words(path: Path) -> str:
    return refusal(path, loader=Fails())


def test_an_error_that_cannot_be_printed_is_told_to_all(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks(2, without_words, tmp_path / "c"):
        assert told.endswith("failed on rank 1: NoWordsError")


def of_a_wrong_map(path: Path) -> str:
    mesh, parts = rank_mesh((2,), ("tp",)), ((0, 8), (8, -2))
    model = nn.Module()
    for name in "ab":
        local = torch.ones(1, 6)
        model.register_parameter(name, nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)])))
    with pytest.raises(CheckpointError) as error:
        save_hf(
            model, path, maps=lambda name, shape: [Link(name, (0, at), (2, n), (0, 1)) for at, n in parts]
        )
    return str(error.value)


def test_a_map_of_negative_sizes_is_refused_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks(2, of_a_wrong_map, tmp_path / "c"):
        assert told == "the maps make a of parts that are not it: a size or an offset is negative"
    assert not (tmp_path / "c").exists()


def of_a_writer_that_fails(path: Path) -> str:
    with (
        mock.patch.object(export, "header_of", side_effect=NoWordsError(None)),
        pytest.raises(CheckpointError) as error,
    ):
        save_hf(nn.Linear(2, 2), path)
    return str(error.value)


def test_whatever_fails_in_the_rank_that_writes_is_told_to_all(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks(2, of_a_writer_that_fails, tmp_path / "c"):
        assert told.endswith("c cannot be written: NoWordsError")


def test_values_in_another_order_are_one_value(ranks: Ranks, tmp_path: Path) -> None:
    assert "ranks" not in str(ranks(2, reordered, tmp_path / "c")[0])


def test_a_value_of_the_optimizer_that_differs_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(2, optimizer_values, tmp_path / "c")
    assert len(set(found)) == 1
    assert (
        "optimizer/model/weight: the ranks have different values of the optimizer's state (mine)" in found[0]
    )


def test_states_whose_names_become_one_are_refused(tmp_path: Path) -> None:
    twins = {1: torch.Generator(), "1": torch.Generator()}
    assert "s has two states called '1'" in refusal(tmp_path / "c", s=twins)


def test_names_that_become_one_without_a_compiled_part_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model._orig_mod = nn.Linear(2, 2)
    assert "two entries of the model are called 'weight'" in refusal(tmp_path / "c", model)


def test_only_whole_parts_of_names_are_left_out(tmp_path: Path) -> None:
    model = nn.Module()
    model.my_orig_mod = nn.Linear(1, 1)
    assert "model/my_orig_mod.weight" in read_manifest(save(tmp_path / "c", model)).tensors


def test_tensors_of_one_value_whose_places_read_alike_are_both_kept(tmp_path: Path) -> None:
    big = torch.arange(50_000)
    extra = {1: big, "1": big + 1, "a": {"b": big + 2}, "a/b": big + 3}
    save(tmp_path / "c", nn.Linear(1, 1), extra=extra)
    found = load(tmp_path / "c", nn.Linear(1, 1)).extra
    pairs = [(found[1], 0), (found["1"], 1), (found["a"]["b"], 2), (found["a/b"], 3)]
    assert all(torch.equal(one, big + more) for one, more in pairs)

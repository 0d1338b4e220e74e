"""The index of a Hugging Face folder decides where a tensor is, and names are never written twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shardwright.checkpoint import load_hf, rename, save_hf
from shardwright.checkpoint.hugging_face.maps import Link
from shardwright.errors import CheckpointError


def folder_of(path: Path, files: dict[str, dict[str, float]], index: dict[str, str]) -> Path:
    """Files whose tensors [2, 2] hold one number, and an index."""
    for name, tensors in files.items():
        save_file({key: torch.full((2, 2), value) for key, value in tensors.items()}, path / name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path


def test_a_stale_file_does_not_count(tmp_path: Path) -> None:
    files = {"a.safetensors": {"0.weight": 1.0}, "b.safetensors": {"1.weight": 2.0, "0.weight": 9.0}}
    folder_of(tmp_path, files, {"0.weight": "a.safetensors", "1.weight": "b.safetensors"})
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    load_hf(model, tmp_path)
    assert [one.weight.flatten().tolist() for one in model] == [[1.0] * 4, [2.0] * 4]


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight": "b.safetensors", "other": "a.safetensors"}, "says that .* is in .*, where it is not"),
        ({"other": "b.safetensors"}, "weight is in no file"),
        ({"weight": "a.safetensors", "other": "b.safetensors", "gone": "b.safetensors"}, "says that gone"),
    ],
)
def test_an_index_of_another_folder_is_refused(tmp_path: Path, index: Any, words: str) -> None:
    folder_of(tmp_path, {"a.safetensors": {"weight": 1.0}, "b.safetensors": {"other": 2.0}}, index)
    with pytest.raises(CheckpointError, match=words):
        load_hf(nn.Linear(2, 2, bias=False), tmp_path)


def test_two_forms_in_one_folder_are_refused(tmp_path: Path) -> None:
    files = {"a.safetensors": {"weight": 1.0}, "model.safetensors": {"weight": 2.0}}
    folder_of(tmp_path, files, {"weight": "a.safetensors"})
    with pytest.raises(CheckpointError, match="which of them is the model is not known"):
        load_hf(nn.Linear(2, 2, bias=False), tmp_path)


def test_an_index_that_names_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    folder_of(tmp_path, {"a.safetensors": {"weight": 1.0}, "b.safetensors": {"weight": 2.0}}, {})
    text = '{"weight_map": {"weight": "a.safetensors", "weight": "b.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="names 'weight' twice"):
        load_hf(nn.Linear(2, 2, bias=False), tmp_path)


@pytest.mark.parametrize("most", [16, 1 << 20])
def test_maps_that_give_two_tensors_one_name_are_refused(tmp_path: Path, most: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    with pytest.raises(CheckpointError, match=r"call two tensors 'w': of 0.weight and of 1.weight"):
        save_hf(model, tmp_path / "out", maps=[rename(r"\d\.weight", "w")], max_shard_size=most)
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize("rows", [(0, 1), (0, 2), (1, 2)])
def test_a_map_that_leaves_elements_out_or_takes_them_twice_is_refused(tmp_path: Path, rows: Any) -> None:
    start, count = rows

    def halves(name: str, shape: tuple[int, ...]) -> list[Link]:
        parts = [("low", 0, 1), ("high", start, count)]
        return [Link(f"{name}.{part}", (at, 0), (n, shape[1]), (0, 1)) for part, at, n in parts]

    with pytest.raises(CheckpointError, match="the maps make weight of parts that are not it"):
        save_hf(nn.Linear(2, 2, bias=False), tmp_path, maps=[halves])


def in_one(*starts: int) -> Any:
    """A map by which "0.weight" and "1.weight" are two rows each of a tensor of four, from these on."""
    return lambda name, shape: [Link("w", (0, 0), shape, (0, 1), ((starts[int(name[0])], 0), (4, 2)))]


def test_a_tensor_of_a_file_is_joined_of_boxes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    save_hf(model, tmp_path, maps=[in_one(0, 2)])
    written = load_file(tmp_path / "model.safetensors")["w"]
    assert torch.equal(written, torch.cat([layer.weight.detach() for layer in model]))


@pytest.mark.parametrize(
    ("second", "words"), [(3, "a box does not lie in its source"), (1, "'w' of the files cannot be joined")]
)
def test_boxes_that_are_not_all_of_a_tensor_of_a_file_are_refused(
    tmp_path: Path, second: int, words: str
) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    with pytest.raises(CheckpointError, match=words):
        save_hf(model, tmp_path, maps=[in_one(0, second)])
    assert not list(tmp_path.glob("*"))

"""The files that an export writes: by which rank, in which order, and of which elements."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shardwright.checkpoint import load_hf, save_hf
from shardwright.errors import CheckpointError
from shardwright.parallel import parallelize_fsdp, parallelize_pipeline
from shardwright.testing import rank_mesh

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

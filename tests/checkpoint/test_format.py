"""The manual's page is enough to read a checkpoint, and its files are of the safetensors format."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

from shardwright.checkpoint import async_save, load, read_manifest, save
from shardwright.checkpoint.storage import manifest
from shardwright.checkpoint.storage.element_types import DTYPES, name_of
from shardwright.errors import CheckpointError
from tests.checkpoint.plain_reader import manifest_of, read_all
from tests.checkpoint.programs import save_it
from tests.checkpoint.test_save_load import LAYOUTS, WORLDS

Ranks = Callable[..., list[Any]]


@pytest.mark.parametrize("layout", ["several boxes", "tp first, then dp"])
def test_a_stranger_reads_it_with_json_and_mmap(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    saved = ranks(WORLDS[layout], save_it, tmp_path / "c", LAYOUTS[layout])[0]
    found = read_all(tmp_path / "c")
    for name, one in saved.items():
        path, _, state = name.partition("/")
        key = f"optimizer/model/{path}/{state}" if state else f"model/{name}"
        assert np.array_equal(found[key], one.numpy()), key


def test_its_files_are_safetensors_and_say_the_same(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_it, tmp_path / "c", LAYOUTS["sharded"])
    found = read_all(tmp_path / "c")
    names = {file["name"] for file in manifest_of(tmp_path / "c")["files"]}
    for name in names:
        with safe_open(tmp_path / "c" / name, "pt") as file:
            for key in file.keys():  # noqa: SIM118  it is no dict
                of, _, offset = key.partition("@")
                at = [int(one) for one in offset.split(",") if one]
                tensor = file.get_tensor(key)
                ends = zip(at, tensor.shape, strict=False)
                box = tuple(slice(o, o + s) for o, s in ends) if at else ()
                assert np.array_equal(found[of][box], tensor.numpy()), key


def test_large_pages_of_files_are_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, lengths = os.writev, list[int]()
    monkeypatch.setattr(os, "writev", lambda *given: lengths.append(write(*given)) or lengths[-1])
    x, page = torch.arange(float(5 << 18)).view(-1, 64), 2 << 20
    y, small = (
        x[: len(x) // 2] + 1,
        torch.arange(9.0),
    )  # a page has the end of one and the beginning of another
    save(tmp_path / "c", x=x, small=small, y=y)
    (size,) = (file["size"] for file in manifest_of(tmp_path / "c")["files"])
    assert lengths[1:5] == [page] * 3 + [
        size - 3 * page
    ]  # the first and the last are the journal, the manifest
    for name, one in {"x": x, "small": small, "y": y}.items():
        assert np.array_equal(read_all(tmp_path / "c")[name], one.numpy())


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_every_element_type_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    from shardwright.checkpoint import load

    bits = torch.randint(0, 2, (3, 5 * dtype.itemsize), dtype=torch.uint8)
    x = bits.view(dtype) if dtype != torch.bool else bits.bool()
    save(tmp_path / "c", x=x, y=x[:, 1:3])
    found, part = torch.zeros_like(x), torch.zeros_like(x[:, 1:3])
    load(tmp_path / "c", x=found, y=part)
    assert torch.equal(found.view(torch.uint8), x.view(torch.uint8))
    assert torch.equal(part.contiguous().view(torch.uint8), x[:, 1:3].contiguous().view(torch.uint8))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("rows", [120, 3001])
@pytest.mark.parametrize("how", ["own", "async", "dcp", "value"])
def test_a_matrix_of_4_bits_may_lie_transposed(tmp_path: Path, rows: int, how: str) -> None:
    """torch copies it as it lies if it is small, and raises NotImplementedError for a larger one."""
    bits = torch.arange(rows * 30).remainder(251).to(torch.uint8).view(rows, 30)
    x = bits.view(torch.float4_e2m1fn_x2).t()
    if how == "async":
        async_save(tmp_path / "c", w=x).wait()
    elif how == "value":
        save(tmp_path / "c", extra={"w": x})
    else:
        save(tmp_path / "c", w=x, format="dcp" if how == "dcp" else "shardwright")
    if how == "dcp":
        found = {"w": torch.zeros(x.shape, dtype=torch.uint8).view(x.dtype)}
        torch.distributed.checkpoint.load(found, checkpoint_id=tmp_path / "c", no_dist=True)
        assert torch.equal(found["w"].view(torch.uint8), bits.t())
    elif how == "value":
        assert torch.equal(load(tmp_path / "c").extra["w"].view(torch.uint8), bits.t())
    else:
        turned = torch.zeros_like(bits).view(x.dtype).t()
        load(tmp_path / "c", w=turned)
        assert torch.equal(turned.view(torch.uint8), bits.t())


def test_an_element_type_is_held_or_refused_by_name(tmp_path: Path) -> None:
    """All that torch has: what it copies comes back (above), of the rest the error says what to save."""
    every = {one for one in vars(torch).values() if isinstance(one, torch.dtype)}
    for dtype in every - set(DTYPES.values()):
        name = str(dtype).removeprefix("torch.")
        small = re.fullmatch(r"u?int[1-7]", name)
        assert small or name.startswith(("qint", "quint")), f"{name} could be held"
        if small:
            with pytest.raises(CheckpointError, match=rf"holds no {name}, .* save its view\(torch.uint8\)"):
                save(tmp_path / "c", x=torch.zeros(4, dtype=dtype))
    with pytest.raises(CheckpointError, match=r"holds no qint8, .* save its int_repr\(\)"):
        name_of(torch.qint8)


def test_the_page_names_every_entry_of_the_manifest(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "guide" / "checkpoints.md"
    told = set(re.findall(r"`(\w+)`", page.read_text().split("## The format")[1]))
    save(tmp_path / "c", nn.Linear(1, 1))
    body = manifest_of(tmp_path / "c")
    part = body["tensors"]["model/weight"]["parts"][0]
    entries = {*body, *body["files"][0], *body["tensors"]["model/weight"], *part}
    assert entries <= told
    assert read_manifest(tmp_path / "c").id == body["id"]


def test_a_manifest_that_nobody_could_read_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path / "c", model, step=1)
    monkeypatch.setattr(manifest, "_MOST", 100_000)
    with pytest.raises(CheckpointError, match=r"the manifest would have 1\d{5} bytes, and 100000 are read"):
        save(tmp_path / "c", model, step=2, extra=bytes(90_000))
    assert load(tmp_path / "c", model).step == 1
    save(tmp_path / "c", model, step=3)
    assert load(tmp_path / "c", model).step == 3

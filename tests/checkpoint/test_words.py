"""What cannot be done is refused in words that say what it is, where raw errors of others came through."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import xxhash
from torch import nn

from shardwright.checkpoint import (
    async_save,
    convert,
    diff,
    load,
    load_hf,
    read_manifest,
    save,
    save_hf,
    step_path,
)
from shardwright.checkpoint.hugging_face.export import _Export
from shardwright.checkpoint.job import Job
from shardwright.checkpoint.others.dcp_export import _Writer
from shardwright.errors import CheckpointError

Save = Callable[..., Any]
SAVES: dict[str, Save] = {
    "save": save,
    "dcp": lambda *args, **kwargs: save(*args, format="dcp", **kwargs),
    "async": lambda *args, **kwargs: async_save(*args, **kwargs).wait(),
}


@pytest.fixture(params=SAVES)
def saves(request: pytest.FixtureRequest) -> Save:
    return SAVES[request.param]


def test_a_lazy_module_has_no_shapes_yet(tmp_path: Path, saves: Save) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    save(tmp_path / "old", nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)))
    for call in (
        lambda: saves(tmp_path / "c", model),
        lambda: load(tmp_path / "old", model),
        lambda: save_hf(model, tmp_path / "hf"),
    ):
        with pytest.raises(CheckpointError, match=r"1\.weight has no shape yet, for its module is lazy"):
            call()
    model(torch.ones(2))
    load(tmp_path / "old", model)


@pytest.mark.parametrize("config", [[1], "abc", 3])
def test_settings_have_names(tmp_path: Path, saves: Save, config: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^config=.* is no dict: give settings by name$"):
        saves(tmp_path / "c", config=config, v=1)


@pytest.mark.parametrize("step", [1 << 62, -1, True, "3"])
def test_a_step_that_no_manifest_holds(tmp_path: Path, saves: Save, step: Any) -> None:
    """A large one was found only when all was written."""
    with pytest.raises(
        CheckpointError, match=r"^step=.* is no number of steps: a whole one from 0 to 2\*\*62"
    ):
        saves(tmp_path / "c", step=step, v=1)
    saves(tmp_path / "c", step=(1 << 62) - 1, v=1)


def test_a_source_whose_step_is_none(tmp_path: Path) -> None:
    """It stays the value that it is, in a checkpoint that says no step."""
    torch.save({"model": {"w": torch.ones(1)}, "step": 1 << 62}, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "c")
    found = read_manifest(tmp_path / "c")
    assert found.step is None
    assert found.values["step"] == 1 << 62


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file takes more than 300 kB, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_disk")
def test_a_full_disk_in_torch_s_format(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the disk did not take all of a file"):
        save(tmp_path / "c", nn.Linear(400, 400), format="dcp")
    assert not (tmp_path / "c").exists()


@pytest.mark.usefixtures("small_disk")
def test_a_full_disk_where_the_manifest_goes(tmp_path: Path) -> None:
    """The system says of an open file no name."""
    with pytest.raises(CheckpointError, match=r"File too large \(.*/c/manifest-[0-9a-f]{16}\.new\)"):
        save(tmp_path / "c", extra="x" * 400_000)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("asked", ["is_dir", "exists"])
def test_a_source_that_may_not_be_looked_at(tmp_path: Path, asked: str) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "x.pt")
    denied = PermissionError(13, "Permission denied")
    with (
        mock.patch.object(Path, asked, side_effect=denied),
        pytest.raises(CheckpointError, match=r"x\.pt cannot be read: Permission denied"),
    ):
        convert(tmp_path / "x.pt", tmp_path / "c")


def forge(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest, and give it the right checksum."""
    body = json.loads(path.read_bytes())["manifest"]
    change(body)
    text = json.dumps(body, separators=(",", ":"))
    sum_of = xxhash.xxh3_128_hexdigest(text.encode())
    path.write_text(f'{{"shardwright": "checkpoint", "checksum": "{sum_of}",\n"manifest": {text}}}\n')


@pytest.mark.parametrize(
    "forged", [float("nan"), {"$": "dict"}, {"$": []}, {"$": "dict", "v": [[{}, 1], [1]]}]
)
def test_values_that_no_save_wrote_are_told_apart(tmp_path: Path, forged: Any) -> None:
    """`diff` ended in the errors of the functions that look at them."""
    one, other = save(tmp_path / "a", v=1), save(tmp_path / "b", v=1)
    forge(other / "manifest.json", lambda body: body["values"].update(v=forged))
    assert "v" in [found.path for found in diff(one, other)]


def test_a_state_of_generators_with_a_negative_word(tmp_path: Path) -> None:
    path = save(tmp_path / "c", v=1)
    forge(
        path / "manifest.json",
        lambda body: body["values"]["rng"]["v"]["0"]["numpy"]["v"].__setitem__(1, [-1] * 624),
    )
    with pytest.raises(CheckpointError, match="c cannot be used: the state of the generators is none"):
        load(path)


@pytest.mark.parametrize("forged", [2.5, "weight", [1]])
def test_parameters_of_a_group_that_are_no_names(tmp_path: Path, forged: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    path = save(tmp_path / "c", model, optimizer)
    forge(
        path / "manifest.json",
        lambda body: body["optimizers"]["optimizer"]["groups"][0].update(params=forged),
    )
    with pytest.raises(CheckpointError, match=r"optimizers.*params are no names"):
        load(path, model, optimizer)


@pytest.mark.parametrize("forged", [1.5, None, [1], "0"])
def test_a_value_of_ranks_that_names_none(tmp_path: Path, forged: Any) -> None:
    path = save(tmp_path / "c", v=1) / "manifest.json"
    forge(path, lambda body: body["values"]["rng"].update(v=forged))
    with pytest.raises(CheckpointError, match="rng is no value that was saved"):
        load(tmp_path / "c")


@pytest.mark.parametrize("step", ["_write", "_commit"])
def test_a_folder_that_goes_while_it_is_written(tmp_path: Path, step: str) -> None:
    """One process was told that ranks do not share a disk."""
    real = getattr(Job, step)

    def gone(*args: Any) -> Any:
        shutil.rmtree(tmp_path / "c")
        return real(*args)

    with (
        mock.patch.object(Job, step, gone),
        pytest.raises(CheckpointError, match="c was removed or emptied while it was written"),
    ):
        save(tmp_path / "c", v=1)


@pytest.mark.parametrize("function", ["stat", "open"])
def test_files_of_others_that_may_not_be_read(
    tmp_path: Path, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had the class and the number of the system's error in its text."""
    save_hf(nn.Linear(2, 2), tmp_path / "hf")
    real = getattr(os, function)

    def denied(path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path).endswith("model.safetensors"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, function, denied)
    with pytest.raises(CheckpointError, match=r"^[^\[]*: Permission denied[^\[]*$"):
        load_hf(nn.Linear(2, 2), tmp_path / "hf")


EXPORTS: dict[tuple[Any, str], Callable[[Path, nn.Module], Any]] = {
    (_Export, "stream"): lambda path, model: save_hf(model, path),
    (_Export, "finish"): lambda path, model: save_hf(model, path),
    (_Export, "name_all"): lambda path, model: save_hf(model, path, max_shard_size=1),
    (_Writer, "prepare_local_plan"): lambda path, model: save(path, model, format="dcp"),
    (_Writer, "write_data"): lambda path, model: save(path, model, format="dcp"),
    (_Writer, "finish"): lambda path, model: save(path, model, format="dcp"),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("emptied", [False, True], ids=["removed", "emptied"])
@pytest.mark.parametrize("step", EXPORTS, ids=[name for _, name in EXPORTS])
def test_a_folder_of_others_that_goes_while_it_is_written(
    tmp_path: Path, step: tuple[Any, str], emptied: bool
) -> None:
    """It had raw errors in its text, or what was saved for torch was not there and nobody was told."""
    real = getattr(*step)

    def gone(*args: Any, **kwargs: Any) -> Any:
        for one in tmp_path.iterdir():
            shutil.rmtree(one)
            if emptied:
                one.mkdir()
        return real(*args, **kwargs)

    with mock.patch.object(*step, gone), pytest.raises(CheckpointError) as error:
        EXPORTS[step](tmp_path / "c", nn.Linear(2, 2))
    assert str(tmp_path) in str(error.value)
    assert "Error" not in str(error.value)
    assert not [one for one in tmp_path.rglob("*") if one.is_file()]


def test_a_name_that_files_keep_for_themselves(tmp_path: Path) -> None:
    """It was written under another name, and no program found it."""
    model = nn.Module()
    model.register_parameter("__metadata__", nn.Parameter(torch.ones(2)))
    with pytest.raises(
        CheckpointError, match="__metadata__ would be called '__metadata__', which these files"
    ):
        save_hf(model, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    save(tmp_path / "c", model)
    nn.init.zeros_(model.get_parameter("__metadata__"))
    load(tmp_path / "c", model)
    assert model.get_parameter("__metadata__").eq(1).all()


@pytest.mark.parametrize("given", [5, "abc", [("weight", (0,), (2,))]])
def test_a_map_that_gives_no_links(tmp_path: Path, given: Any) -> None:
    def mine(_: str, __: tuple[int, ...]) -> Any:
        return given

    model = nn.Linear(2, 2)
    with pytest.raises(
        CheckpointError, match=r"mine.*, a map of maps=, gives .* for weight: a map gives a list"
    ):
        save_hf(model, tmp_path / "c", maps=mine)
    save_hf(model, tmp_path / "c")
    with pytest.raises(
        CheckpointError, match=r"mine.*, a map of maps=, gives .* for weight: a map gives a list"
    ):
        load_hf(model, tmp_path / "c", maps=mine)


def test_a_step_may_be_counted_by_numpy(tmp_path: Path) -> None:
    number = np.int64(3)
    saved = save(step_path(tmp_path, number), nn.Linear(2, 2), step=number)
    assert (saved.name, read_manifest(saved).step) == ("step-00000003", 3)

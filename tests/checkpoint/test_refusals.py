"""A checkpoint that does not fit, is damaged or unfinished is refused in one line, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from shardwright.checkpoint import (
    choose,
    convert,
    list_checkpoints,
    load,
    prune,
    read_manifest,
    save,
    save_hf,
    step_path,
)
from shardwright.errors import CheckpointError
from tests.checkpoint.programs import (
    Setup,
    arguments_of_one_rank,
    refused,
    save_it,
    save_unreduced,
    save_where_one_rank_fails,
)

Ranks = Callable[..., list[Any]]
TWO = Setup({"dp": 2}, {})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_it(tmp_path / "c", None)
    return tmp_path / "c"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("shape", "another model: model/scale is float32[] in the checkpoint but float32[2] in the model"),
        ("dtype", "scale is float32[] in the checkpoint but float64[] in the model"),
        ("one more", "more is not in the checkpoint"),
        ("one less", "seen is not in the model"),
        ("untied", "head is tied to model/embedding in the checkpoint but not in the model"),
        ("regroup", "the optimizer's groups differ"),
        ("foreign parameter", "is no parameter of the model"),
    ],
)
def test_another_model_is_refused_and_nothing_changes(saved: Path, change: str, words: str) -> None:
    text, unchanged = refused(saved, None, change)
    assert words in text
    assert "\n" not in text
    assert unchanged


def test_another_optimizer_is_refused_and_nothing_changes(saved: Path) -> None:
    text, unchanged = refused(saved, None, "nothing", "SGD")
    assert text.startswith(f"{saved} is not of this state: optimizer: ")
    assert "holds the state of AdamW, not of SGD" in text
    assert unchanged


def damage(path: Path, how: str) -> None:
    data = next(path.glob("data-*.safetensors"))
    content = data.read_bytes()
    if how == "short":
        data.write_bytes(content[:-100])
    elif how == "missing":
        data.unlink()
    elif how == "flipped":
        middle = len(content) // 2
        data.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif how == "short manifest":
        (path / "manifest.json").write_text((path / "manifest.json").read_text()[:-50])
    elif how == "edited manifest":
        text = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(text.replace('"step":3', '"step":4'))
    elif how == "newer":
        text = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(text.replace('"version":2', '"version":99'))


DAMAGE = {
    "short": "bytes, ",
    "missing": "is missing",
    "flipped": "wrong checksum",
    "short manifest": "its manifest has been changed or damaged (it ends too early)",
    "edited manifest": "its manifest has been changed or damaged",
    "newer": "its format is version 99",
}


@pytest.mark.parametrize(("how", "words"), DAMAGE.items())
def test_a_damaged_checkpoint_is_refused_and_nothing_changes(saved: Path, how: str, words: str) -> None:
    damage(saved, how)
    text, unchanged = refused(saved, None, "nothing")
    assert words in text
    assert unchanged


def test_every_rank_refuses_what_one_rank_found(ranks: Ranks, saved: Path) -> None:
    """Ranks share the files between them, so only one of the two sees the wrong byte."""
    damage(saved, "flipped")
    found = ranks(2, refused, saved, TWO, "nothing")
    assert found[0] == found[1]
    assert "wrong checksum" in found[0][0]
    assert found[0][1]


def test_a_failure_of_one_rank_ends_the_save_on_all_and_commits_nothing(ranks: Ranks, tmp_path: Path) -> None:
    texts = ranks(2, save_where_one_rank_fails, tmp_path / "c")
    assert texts[0] == texts[1]
    assert "failed on rank 1: OSError: the disk is full" in texts[0]
    assert not (tmp_path / "c").exists()


def test_arguments_of_one_rank_that_are_wrong_are_refused_on_all(ranks: Ranks, tmp_path: Path) -> None:
    """One rank raised at once, and the others waited for it."""
    found = ranks(2, arguments_of_one_rank, tmp_path)
    assert found[0] == found[1]
    *others, patterns, others_patterns, hf, to_hf, maps, apart = found[0]
    assert all("None is no path" in text for text in (*others, hf, to_hf))
    assert len(others) == 4
    assert "only=3" in patterns
    assert "only= is another on rank 1 than on rank 0" in others_patterns
    assert "maps=None is no map" in maps
    assert "own-1, which rank 0 made as" in apart
    assert not (tmp_path / "n").exists()


def test_a_parameter_that_is_still_to_be_summed_is_not_saved(ranks: Ranks, tmp_path: Path) -> None:
    assert "is not finished: reduce it first" in ranks(2, save_unreduced, tmp_path / "c")[0]


def test_a_checkpoint_that_is_saved_again_is_replaced_even_if_it_was_damaged(saved: Path) -> None:
    damage(saved, "short manifest")
    save(saved, model=nn.Linear(1, 1), step=8)
    assert read_manifest(saved).step == 8
    assert [one.name for one in saved.parent.iterdir()] == ["c"]


def test_a_folder_that_is_no_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        save(tmp_path, model=nn.Linear(1, 1))
    assert (tmp_path / "thesis.txt").exists()


class TestChoice:
    """Which checkpoint of a run is resumed from."""

    @pytest.fixture
    def out(self, tmp_path: Path) -> Path:
        for step in (1, 2, 3):
            save(step_path(tmp_path, step), model=nn.Linear(2, 2), step=step)
        return tmp_path

    def test_it_is_the_newest(self, out: Path) -> None:
        assert choose(out).path == step_path(out, 3)
        assert choose(out).skipped == ()

    @pytest.mark.parametrize("how", ["short", "missing", "short manifest", "edited manifest"])
    def test_one_that_is_damaged_is_skipped_and_reported(self, out: Path, how: str) -> None:
        damage(step_path(out, 3), how)
        choice = choose(out)
        assert choice.path == step_path(out, 2)
        assert str(choice.skipped[0]).startswith("skipped step-00000003: ")

    def test_an_unfinished_one_is_skipped_and_reported(self, out: Path) -> None:
        (step_path(out, 3) / "manifest.json").unlink()
        choice = choose(out)
        assert choice.path == step_path(out, 2)
        assert "never finished" in str(choice.skipped[0])

    def test_an_unfinished_one_that_is_named_is_refused(self, out: Path) -> None:
        (step_path(out, 3) / "manifest.json").unlink()
        with pytest.raises(CheckpointError, match="never finished"):
            choose(out, "step-00000003")
        with pytest.raises(CheckpointError, match=r"no checkpoint 'step-9' in .*step-00000002, step-0"):
            choose(out, "step-9")

    def test_a_folder_without_a_finished_one_is_refused(self, tmp_path: Path) -> None:
        step_path(tmp_path, 7).mkdir(parents=True)
        with pytest.raises(CheckpointError, match=r"no finished checkpoint to resume from \(skipped step-0"):
            choose(tmp_path)

    def test_pruning_keeps_the_newest_and_removes_what_was_left_unfinished(self, out: Path) -> None:
        (step_path(out, 1) / "manifest.json").unlink()
        step_path(out, 9).mkdir()
        prune(out, keep=1)
        listing = list_checkpoints(out)
        assert listing.committed == (step_path(out, 3),)
        assert listing.unfinished == (step_path(out, 9),)
        assert not step_path(out, 1).exists()

    def test_the_manifest_says_what_is_inside(self, out: Path) -> None:
        manifest = read_manifest(step_path(out, 2))
        assert manifest.step == 2
        assert {name: str(one) for name, one in manifest.tensors.items()} == {
            "model/weight": "float32[2, 2]",
            "model/bias": "float32[2]",
        }


@pytest.mark.parametrize(
    ("name", "why"),
    [("x" * 300, "too long"), ("a\0b", "a byte of zero"), ("a\ud800", "utf-8 here, which has no such")],
    ids=["long", "zero", "half"],
)
def test_a_name_that_no_folder_has_is_refused(tmp_path: Path, name: str, why: str) -> None:
    for use in (
        lambda: save(name, extra=1),
        lambda: choose(tmp_path, name),
        lambda: choose(name),
        lambda: convert(name, tmp_path / "c"),
        lambda: save_hf(nn.Linear(1, 1), name),
    ):
        with pytest.raises(CheckpointError, match=f"no folder can be called .*{why}"):
            use()


def test_a_name_in_a_folder_that_is_gone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for use in (lambda: save("c", extra=1), lambda: load("c"), lambda: step_path("run", 1)):
        with pytest.raises(
            CheckpointError, match=r"(c|run) is named from the folder in which this process is"
        ):
            use()


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a shell, for every verb; no folder of the name `~` is made where the process stands."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    for where in ("~/text", Path("~/path"), step_path("~/run", 1)):
        path = save(where, extra=1)
        assert path.is_relative_to(home)
        assert read_manifest(where) == read_manifest(path)
    assert choose("~/run").path == home / "run/checkpoints/step-00000001"
    assert [one.name for one in list_checkpoints(Path("~/run")).committed] == ["step-00000001"]
    assert not list(here.iterdir())
    with pytest.raises(CheckpointError, match="a user who is not known here"):
        save("~nobody-of-this-name/c", extra=1)


@pytest.mark.parametrize(
    ("below", "words"),
    [
        ("checkpoints/step-00000001", "is the folder of a run: name one of its checkpoints"),
        ("step-00000001", "is the folder of a run: name one of its checkpoints"),
        ("model.safetensors", "`load_hf` reads those of Hugging Face"),
        ("", "was never finished"),
    ],
)
def test_a_folder_without_a_manifest_says_what_it_is(tmp_path: Path, below: str, words: str) -> None:
    (tmp_path / below).mkdir(parents=True, exist_ok=True)
    if below.startswith("model"):
        (tmp_path / below).rmdir()
        (tmp_path / below).touch()
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path, nn.Linear(1, 1))


@pytest.mark.parametrize("keep", ["x", None, 0, 1.5, True])
def test_a_number_of_checkpoints_that_is_none_is_refused(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(CheckpointError, match=r"keep=.* is no whole number above 0; keep at least 1"):
        prune(tmp_path, keep=keep)
    with pytest.raises(CheckpointError, match=r"every=.* is no whole number above 0"):
        prune(tmp_path, keep=1, every=keep if keep is not None else 0)

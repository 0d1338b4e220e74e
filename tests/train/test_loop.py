"""What a run leaves behind, how it stops, and how it goes on."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest

from shardwright.errors import CheckpointError, ConfigError
from shardwright.train.data import load_corpus
from shardwright.train.loop import told_changes
from shardwright.train.metrics import read_metrics
from shardwright.train.model import Decoder, ModelShape
from tests.train.worlds import tiny, write_text


def trained(settings: dict[str, Any], stop_at: int = 0, *, draws: bool = False) -> int | str:
    """Run the loop on this rank; the exit code, or the user's error.

    Args:
        draws: the loss curve too, which takes longer than a small run and is the same in all of them.
    """
    from shardwright.launch import supervise
    from shardwright.launch.board import Board
    from shardwright.launch.supervise import Watch
    from shardwright.train import loop
    from shardwright.train.run_folder import RunFolder
    from shardwright.train.runner import degrees

    config = tiny(**settings)
    watch = Watch(Board.private(config.world))
    supervise.install(watch)
    without = contextlib.nullcontext() if draws else mock.patch.object(RunFolder, "draw")
    with without, degrees(config).build(device="cpu") as context:
        run = loop.TrainingRun(config, context, loop.open_folder(config, context))
        if context.rank == config.world - 1:
            run.trainer.observers.append(StopAt(stop_at, watch.board))
        try:
            return run.run()
        except (ConfigError, CheckpointError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            supervise.install(None)


class StopAt:
    """Asks for a stop, on one rank only, while a step runs."""

    def __init__(self, step: int, board) -> None:
        self.step, self.board = step, board

    def reduced(self, step: int, trainer) -> None:
        if step == self.step:
            self.board.ask_to_stop(2)

    def after(self, step: int, trainer, result) -> None:
        pass


def losses(folder) -> list[float]:
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


TWO = {"world": 2, "dp_replicate": 1}  # what leaves files, stops and goes on does so on two ranks as on more


@pytest.fixture
def settings(tmp_path) -> dict[str, Any]:
    write_text(tmp_path / "text")
    return {"data": tmp_path / "text", "out": tmp_path / "out", "world": 4, "dp_replicate": 2, "ep": 2}


def test_a_run_leaves_all_its_files(ranks, settings):
    assert ranks(2, trained, settings | TWO, draws=True) == [0] * 2
    out = settings["out"]
    files = {"metrics.jsonl", "loss.png", "layouts.txt", "sample.txt", "config.json", "checkpoints"}
    assert {path.name for path in out.iterdir()} == files
    assert len(losses(out)) == 3
    names = [name for name, _ in Decoder(ModelShape.of(tiny())).named_parameters()]
    layouts = (out / "layouts.txt").read_text()
    assert all(name in layouts for name in names)
    assert "@ep_shard" in layouts
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000003"]
    line = read_metrics(out / "metrics.jsonl")[-1]
    assert line["held_out_loss"] > 0
    assert line["bytes_communicated"] > 0
    assert 0 < line["load_entropy"] <= 1.39


def test_a_run_names_what_it_has_left(ranks, settings, capsys):
    """A run of no steps has no checkpoint."""
    assert ranks(1, trained, {**settings, "world": 1, "dp_replicate": 1, "ep": 1, "steps": 0}) == [0]
    said = capsys.readouterr().out
    assert "parameters on one device; " in said
    assert f"metrics, loss curve, layouts and sample are in {settings['out']}" in said


def test_a_new_run_refuses_a_folder_that_holds_something(ranks, settings):
    settings["out"].mkdir()
    (settings["out"] / "precious").touch()
    found = ranks(2, refused, settings | TWO)
    assert found[0] == found[1]
    assert "is not empty" in found[0]
    assert "--resume" in found[0]


def refused(settings: dict[str, Any]) -> str:
    try:
        trained(settings)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_stop_on_one_rank_ends_all_after_the_same_step_with_a_checkpoint(ranks, settings):
    settings |= TWO
    assert ranks(2, trained, settings | {"steps": 9}, 4) == [130] * 2
    out = settings["out"]
    assert len(losses(out)) == 4
    assert (out / "checkpoints" / "step-00000004").is_dir()
    assert ranks(2, trained, settings | {"steps": 6, "resume": "newest"}) == [0] * 2
    assert len(losses(out)) == 6


@pytest.mark.parametrize(
    "other",
    [
        {},
        pytest.param({"world": 2, "dp_replicate": 1, "ep": 1}, marks=pytest.mark.slow),
        pytest.param({"world": 2, "dp_replicate": 2, "ep": 2}, marks=pytest.mark.slow),
        pytest.param({"world": 1, "dp_replicate": 1, "ep": 1}, marks=pytest.mark.slow),
        pytest.param({"world": 2, "dp_replicate": 1, "ep": 1, "pp": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"world": 4, "dp_replicate": 1, "ep": 2, "tp": 2, "sp": True, "cp": 2}, marks=pytest.mark.slow
        ),
    ],
    ids=["the same mesh", "two ranks, fsdp", "two ranks, experts", "one rank", "two stages", "cut sequences"],
)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(ranks, settings, tmp_path, other):
    """Bit for bit on the same mesh; within rounding on another."""
    settings |= {} if other else TWO
    steps = {"steps": 4, "checkpoint_every": 2}
    assert ranks(settings["world"], trained, settings | steps) == [0] * settings["world"]
    expected = losses(settings["out"])
    path = settings["out"] / "checkpoints" / "step-00000004"
    path.rename(path.with_name("moved-4"))
    resumed = settings | steps | other | {"resume": "newest"}
    assert ranks(resumed["world"], trained, resumed) == [0] * resumed["world"]
    found = losses(settings["out"])
    assert found[:2] == expected[:2]
    if not other:
        assert found == expected
    assert found[2] == pytest.approx(expected[2], rel=1e-6)
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_a_run_with_stages_goes_on_without_and_leaves_all_parameters(ranks, settings):
    steps = {"steps": 4, "checkpoint_every": 2, "world": 4, "dp_replicate": 1, "pp": 2, "ep": 1}
    assert ranks(4, trained, settings | steps) == [0] * 4
    expected = losses(settings["out"])
    assert all(f"blocks.{i}.moe.router" in (settings["out"] / "layouts.txt").read_text() for i in (0, 1))
    (settings["out"] / "checkpoints" / "step-00000004").rename(settings["out"] / "checkpoints" / "moved")
    resumed = settings | steps | {"world": 1, "pp": 1, "resume": "newest"}
    assert ranks(1, trained, resumed) == [0]
    assert losses(settings["out"]) == pytest.approx(expected, abs=1e-4)


def test_a_run_that_goes_on_with_other_settings_says_which(tmp_path):
    write_text(tmp_path / "text")
    was = {**tiny().model_dump(mode="json"), "data_sum": load_corpus(tmp_path / "text", 16).sum}
    (tmp_path / "text").write_bytes((tmp_path / "text").read_bytes() + b"more")
    now = {**tiny(seed=2, tp=2).model_dump(mode="json"), "data_sum": load_corpus(tmp_path / "text", 16).sum}
    seed, text = told_changes(was, now)
    assert seed == "seed was 0, and is 2 from here on"
    assert text.startswith("data_sum was ")
    assert told_changes({}, now) == told_changes(now, now) == []


def test_resume_without_a_finished_checkpoint_is_refused(ranks, settings):
    settings["out"].mkdir()
    found = ranks(2, trained, settings | TWO | {"resume": "newest"})
    assert found[0] == found[1]
    assert "no finished checkpoint" in found[0]


def test_resume_of_another_model_is_refused(ranks, settings):
    base = settings | TWO
    assert ranks(2, trained, base) == [0, 0]
    found = ranks(2, trained, base | {"experts": 8, "resume": "newest"})
    assert "another model" in found[0]


def test_going_on_from_an_older_checkpoint_sets_the_later_ones_aside(ranks, settings):
    settings |= TWO | {"steps": 6, "checkpoint_every": 2}
    assert ranks(2, trained, settings) == [0, 0]
    expected = losses(settings["out"])
    damaged = settings["out"] / "checkpoints" / "step-00000006"
    next(damaged.glob("data-*")).unlink()
    assert ranks(2, trained, settings | {"resume": "step-00000002"}) == [0, 0]
    names = {path.name for path in (settings["out"] / "checkpoints").iterdir()}
    assert names == {f"{kind}step-{step:08d}" for kind in ("", "discarded-") for step in (2, 4, 6)} - {
        "discarded-step-00000002"
    }
    assert losses(settings["out"]) == expected


def test_a_damaged_newest_checkpoint_is_skipped_and_written_anew(ranks, settings):
    settings |= TWO | {"steps": 4, "checkpoint_every": 2}
    assert ranks(2, trained, settings) == [0, 0]
    folder = settings["out"] / "checkpoints"
    (folder / "step-00000004" / "manifest.json").unlink()
    assert ranks(2, trained, settings | {"resume": "newest"}) == [0, 0]
    assert (folder / "step-00000004" / "manifest.json").exists()
    assert len(losses(settings["out"])) == 4

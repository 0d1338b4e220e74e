"""The command line answers at once, and refuses in one line with exit code 2 before it starts anything."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import typer

from shardwright import checkpoint
from shardwright.cli import train as cli_train
from shardwright.cli.app import app, main
from shardwright.plan.network import Network
from shardwright.train.config import TrainConfig

SOURCE = Path(__file__).parents[2] / "src"
ISSUE_FLAGS = [
    *("--world", "--dp-replicate", "--dp-shard", "--cp-replicate", "--tp", "--ep", "--steps", "--batch-size"),
    *("--seq-len", "--experts", "--top-k", "--lr", "--dtype", "--device", "--seed", "--out", "--resume"),
    *("--checkpoint-every", "--timeout", "--verify", "--data", "--pp", "--cp", "--sp", "--micro-batches"),
    *("--layers", "--unit-mib"),
]


def shell(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shardwright", *words],
        env={**os.environ, "PYTHONPATH": str(SOURCE), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which a command is refused."""
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "Traceback" not in said.err
    return said.err


@pytest.mark.processes
def test_help_comes_in_less_than_a_third_of_a_second_of_work_and_without_torch() -> None:
    """Processor time, so that a busy machine does not matter."""
    program = (
        "import sys, time; from shardwright.cli import main; main(['--help']);"
        "assert not {'torch', 'rich', 'pydantic', 'numpy'} & set(sys.modules); print(time.process_time())"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert float(found.stdout.split()[-1]) < 0.3
    assert all(command in found.stdout for command in ("train", "plan", "explain", "doctor"))


@pytest.mark.processes
def test_python_dash_m_is_the_command() -> None:
    """By words that are refused, which imports no torch; tests/docs runs the commands of all pages."""
    found = shell("train", "--world", "4", "--tp", "3")
    assert found.returncode == 2
    assert found.stdout == ""
    assert found.stderr.startswith("shardwright: ")
    assert found.stderr.count("\n") == 1


@pytest.mark.parametrize("flag", ISSUE_FLAGS)
def test_every_flag_of_train_is_a_setting(flag: str) -> None:
    option = next(one for one in typer.main.get_command(app).commands["train"].params if flag in one.opts)
    assert option.name in TrainConfig.model_fields
    assert option.default in (None, False)
    assert option.help


def test_the_help_of_train_tells_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for name in ("steps", "batch_size", "seq_len", "lr", "timeout", "dtype", "dp_replicate"):
        flag = f"--{name.replace('_', '-')} "
        told = said.split(flag)[1].split("--")[0]
        assert f"[default: ({TrainConfig.model_fields[name].default})]" in told
    assert "[default: (the rest of the world)]" in said


def test_the_word_for_the_newest_checkpoint_is_one_everywhere() -> None:
    assert cli_train.NEWEST == checkpoint.NEWEST


def test_train_has_no_other_flag() -> None:
    params = typer.main.get_command(app).commands["train"].params
    assert sorted(opt for one in params for opt in one.opts) == sorted(ISSUE_FLAGS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--world 4 --tp 3", "multiply to 3, which does not divide --world 4"),
        ("--world 4 --dp-replicate 2 --dp-shard 4", "multiply to 8"),
        ("--world 4 --ep 3", "--ep 3 does not divide the 4 data and context parallel ranks"),
        ("--world two", "Invalid value for '--world'"),
        ("--wrld 2", "No such option: --wrld"),
        ("--dtype float16", "--dtype 'float16' cannot be used"),
        ("--lr -1", "--lr -1.0 cannot be used"),
        ("--data /nowhere", "--data /nowhere does not exist"),
        ("--resume", "--resume needs the folder"),
        ("--out /nowhere/at/all --resume", "does not exist, so there is nothing to --resume"),
        ("extra", "unexpected extra argument"),
    ],
)
def test_a_wrong_setting_of_train_is_refused(
    capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    assert said in refused(capsys, "train", *words.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("checkpoint", "Missing command: see shardwright checkpoint --help"),
        ("checkpoint prune .", "Missing option '--keep': see shardwright checkpoint prune --help"),
        ("plan", "see shardwright plan --help"),
        ("nothing", "see shardwright --help"),
    ],
)
def test_a_refusal_names_the_help_of_its_own_command(
    capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    assert said in refused(capsys, *words.split())


def test_a_folder_that_holds_something_is_refused_without_resume(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "something").touch()
    assert "is not empty" in refused(capsys, "train", "--out", str(tmp_path))


def test_resume_without_a_finished_checkpoint_is_refused_and_says_what_it_skipped(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "checkpoints" / "step-00000010.partial").mkdir(parents=True)
    text = refused(capsys, "train", "--out", str(tmp_path), "--resume")
    assert "no finished checkpoint to resume from (skipped step-00000010.partial" in text
    assert "never finished" in refused(
        capsys, "train", "--out", str(tmp_path), "--resume", "step-00000010.partial"
    )


@pytest.mark.processes
def test_a_refusal_comes_before_torch_is_imported() -> None:
    """So it comes before any process is started."""
    program = (
        "import sys; from shardwright.cli import main; code = main(['train', '--world', '4', '--tp', '3']);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        check=False,
        timeout=60,
    )
    assert found.returncode == 2


def test_ranks_of_torchrun_refuse_in_one_line_together(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["train", "--world", "4"]) == 2
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert "--world 4 but 2 ranks are running" in refused(capsys, "train", "--world", "4")
    monkeypatch.setenv("RANK", "2")
    assert "RANK=2 and WORLD_SIZE=2, and ranks count from 0" in refused(capsys, "train")
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert "WORLD_SIZE='many', which is not a number" in refused(capsys, "train")


class TestPlanAndExplain:
    def test_plan_shows_bytes_and_steps(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", "f32[8@tp, 4] {dp: Partial(sum)}", "f32[8, 4]", "--mesh", "dp=2,tp=2"]) == 0
        said = capsys.readouterr().out
        assert "f32[8@tp, 4] {dp: Partial(sum)} -> f32[8, 4]" in said
        assert "at least" in said

    def test_plan_goes_to_another_mesh(self, capsys: pytest.CaptureFixture[str]) -> None:
        meshes = ["--mesh", "dp=4", "--to-mesh", "tp=3", "--to-rank", "3"]
        assert main(["plan", "f32[8@dp, 4]", "f32[8@tp, 4]", *meshes]) == 0
        assert "of ranks 0, 1, 2, 3 -> MeshShape(tp=3) of ranks 3, 4, 5" in capsys.readouterr().out

    def test_explain_shows_the_rule_and_what_moves(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["explain", "aten::mm", "f32[8@dp, 16]", "f32[16, 4@dp]", "--mesh", "dp=2"]) == 0
        said = capsys.readouterr().out
        assert "m k, k n -> m n" in said
        assert "B over all ranks" in said

    def test_explain_takes_a_negative_dim_for_an_operand(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["aten::softmax.int", "f32[8@dp, 16]", "-1", "--mesh", "dp=2"]
        assert main(["explain", *words]) == 0
        assert "aten::softmax.int" in capsys.readouterr().out
        assert main(["explain", *words, "--messh"]) == 2
        assert "'--messh' is neither a layout" in capsys.readouterr().err

    def test_explain_takes_values_beside_layouts(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["explain", "aten::sum.dim_IntList", "f32[8@dp, 16]", "[1]", "--mesh", "dp=2"]
        assert main(words) == 0
        assert "f32[8@dp]" in capsys.readouterr().out

    def test_explain_takes_lists_of_layouts(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["explain", "aten::cat", "[f32[8@(tp, dp), 4], f32[8, 4]]", "1", "--mesh", "dp=2,tp=2"]
        assert main(words) == 0
        assert "f32[8@(tp, dp), 8]" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["plan", "f32[8@dp]", "f32[8@tp]", "--mesh", "dp=2"], "names the axis 'tp'"),
            (["plan", "f32[8", "f32[8]", "--mesh", "dp=2"], "f32[8"),
            (["plan", "f32[8]", "f32[8]", "--mesh", "dp"], "'dp' is no axis; write name=size"),
            (["plan", "f32[8]", "f32[8]", "--mesh", "dp=99999999999999999999"], "1,048,576 at most"),
            (["plan", "f32[8]", "f32[9]", "--mesh", "dp=2"], "9"),
            (["plan", "f32[8]", "f32[8]", "--mesh", "dp=2", "--to-mesh", "tp"], "--to-mesh 'tp'"),
            (["plan", "f32[8]", "f32[8]", "--mesh", "dp=2", "--to-rank", "2"], "add --to-mesh"),
            (["plan", "f32[8]", "--mesh", "dp=2"], "Missing argument 'TARGET'"),
            (["explain", "aten::nothing", "f32[8]", "--mesh", "dp=2"], "there is no op 'aten::nothing'"),
            (["explain", "aten::mm", "f32[8]", "--mesh", "dp=2"], "aten::mm refuses these operands"),
            (["explain", "aten::neg", "what?", "--mesh", "dp=2"], "neither a layout"),
            (["explain", "aten::cat", "[f32[8], what?]", "--mesh", "dp=2"], "operand 'what?' is neither"),
        ],
    )
    def test_what_cannot_be_read_is_refused(
        self, capsys: pytest.CaptureFixture[str], words: list[str], said: str
    ) -> None:
        assert said in refused(capsys, *words)


@pytest.mark.slow
@pytest.mark.processes
def test_doctor_finds_two_ranks_that_talk_and_leaves_nothing_running(tmp_path: Path) -> None:
    began = time.monotonic()
    found = shell("doctor", "--save", str(tmp_path / "network.json"), RANK="0", WORLD_SIZE="1")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "ok two ranks" in found.stdout
    assert "?  environment" in found.stdout
    assert "all is well" in found.stdout
    network = Network.from_json((tmp_path / "network.json").read_text())
    assert 16 * 1024 <= (network.one_round_bytes or 0) <= 256 * 1024
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("sizes", ["99999999999999999999", "9000000000000, 9000000000000", "0, 1e0"])
def test_sizes_of_no_tensor_are_refused(capsys: pytest.CaptureFixture[str], sizes: str) -> None:
    """Numbers of 64 bits had overflowed, in a traceback or in what a plan said that it moves."""
    assert "f32[" in refused(capsys, "plan", "--mesh", "dp=2", f"f32[{sizes}]", f"f32[{sizes}]")


def test_the_file_of_doctor_is_refused_before_it_measures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "cannot be written" in refused(capsys, "doctor", "--save", str(tmp_path))
    assert "cannot be written" in refused(capsys, "doctor", "--save", str(tmp_path / "no" / "file"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_under_the_output_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
    monkeypatch.setattr(sys, "stdout", full)
    assert "No space left" in refused(capsys, "plan", "--mesh", "dp=2", "f32[8@dp]", "f32[8]")
    with pytest.raises(OSError, match="No space left"):  # what it holds
        full.close()


def test_a_run_without_checkpoints_is_told_apart(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "the path is empty" in refused(capsys, "checkpoint", "prune", "", "--keep", "1")
    assert "holds no checkpoints" in refused(capsys, "checkpoint", "prune", str(tmp_path), "--keep", "1")
    checkpoint.save(tmp_path / "alone", torch.nn.Linear(1, 1))
    assert main(("checkpoint", "ls", str(tmp_path / "alone"))) == 1
    assert "one checkpoint, not the folder of a run" in capsys.readouterr().out

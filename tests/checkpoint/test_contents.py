"""Checkpoints can be listed, shown, verified, compared and pruned without a model, from the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.checkpoint import contents, diff, save, step_path, verify
from shardwright.cli.app import main
from shardwright.errors import CheckpointError
from tests.checkpoint.faults import damage
from tests.checkpoint.programs import save_it
from tests.checkpoint.test_save_load import LAYOUTS, WORLDS

Ranks = Callable[..., list[Any]]


def test_two_layouts_of_one_state_hold_the_same(ranks: Ranks, tmp_path: Path) -> None:
    for name in ("several boxes", "tp first, then dp"):
        ranks(WORLDS[name], save_it, tmp_path / name, LAYOUTS[name])
    found = diff(tmp_path / "several boxes", tmp_path / "tp first, then dp")
    assert {one.path for one in found} <= {"rng"}


def test_a_difference_is_named(tmp_path: Path) -> None:
    one, other = nn.Linear(3, 300_000), nn.Linear(3, 300_000)
    other.load_state_dict(one.state_dict())
    with torch.no_grad():
        other.weight[200_000, 1] += 1
    other.register_buffer("more", torch.ones(1))
    save(tmp_path / "a", one, extra=1)
    save(tmp_path / "b", other, extra=2)
    found = {difference.path: difference.how for difference in diff(tmp_path / "a", tmp_path / "b")}
    assert found.keys() == {"model/weight", "model/more", "extra"}
    assert found["model/weight"].endswith("of 3600000 bytes differ")


def test_every_byte_is_verified(tmp_path: Path) -> None:
    damage.saved(tmp_path / "c")
    seen: list[int] = []
    assert verify(tmp_path / "c", seen.append) >= sum(seen) > 1_000_000
    data = next((tmp_path / "c").glob("data-*"))
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match="wrong checksum"):
        verify(tmp_path / "c")


@pytest.mark.parametrize("shape", [(1, 3000), (3, 5, 70), (2, 1, 1, 700), (700,), (40, 3), (2, 101, 0), ()])
def test_no_block_is_larger_than_it_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    """The rows of a first dim of 1 were one block, of any size."""
    monkeypatch.setattr(contents, "_BLOCK", 1024)
    one = torch.rand(shape)
    other = one + (torch.rand(shape) > 0.5)
    save(tmp_path / "a", t=one)
    save(tmp_path / "b", t=other)
    seen: list[int] = []
    verify(tmp_path / "a", seen.append)
    assert sum(seen) == one.nbytes
    assert max(seen, default=0) <= 1024
    differ = int((one.view(-1).view(torch.uint8) != other.view(-1).view(torch.uint8)).sum())
    found = [one.how for one in diff(tmp_path / "a", tmp_path / "b") if one.path == "t"]
    assert found == ([f"{differ} of {one.nbytes} bytes differ"] if differ else [])


class TestCommandLine:
    @pytest.fixture
    def out(self, tmp_path: Path) -> Path:
        for step in (1, 2, 3):
            torch.manual_seed(step)
            save(step_path(tmp_path, step), nn.Linear(2, 2), step=step)
        return tmp_path

    def test_ls_says_which_can_be_used_and_why_not(self, out: Path, capsys: Any) -> None:
        (step_path(out, 3) / "manifest.json").unlink()
        assert main(["checkpoint", "ls", str(out)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert "step-00000003  !! " in lines[0]
        assert "never finished" in lines[0]
        assert lines[1].startswith("step-00000002  step 2, 2 tensors, ")
        assert main(["checkpoint", "ls", str(out / "nowhere")]) == 1

    def test_show_lists_tensors(self, out: Path, capsys: Any) -> None:
        assert main(["checkpoint", "show", str(step_path(out, 1)), "--match", "model/w*"]) == 0
        text = capsys.readouterr().out
        assert "model/weight  float32[2, 2]  16 B in 1 box" in text
        assert "bias" not in text

    def test_names_control_no_terminal(self, tmp_path: Path, capfd: Any) -> None:
        """A checkpoint of somebody else could ring, turn the text around and write lines of its own."""
        names = ["a\x1b[31mb", "c\x07", "d\u202ee", "f\nPATH: every byte is as it was written", "\u00e9"]
        for number in range(2):
            save(tmp_path / str(number), state={name: torch.full((2,), number) for name in names})
        main(["checkpoint", "show", str(tmp_path / "0"), "--match", "state/*"])
        main(["checkpoint", "diff", str(tmp_path / "0"), str(tmp_path / "1")])
        data = next((tmp_path / "0").glob("data*"))
        data.write_bytes(data.read_bytes().replace(bytes(8), bytes(7) + b"1"))
        main(["checkpoint", "verify", str(tmp_path / "0")])
        main(["checkpoint", "ls", f"{tmp_path}/\x1b[31m"])
        main(["checkpoint", "show", f"{tmp_path}/\x1b[31m"])
        said = capfd.readouterr()
        lines = f"{said.out}{said.err}".split("\n")
        assert all(line.isprintable() for line in lines), said
        assert sum("\\x1b[31m" in line for line in lines) == 5
        assert sum("\u00e9" in line for line in lines) == 2
        assert not [line for line in lines if line.startswith("PATH")]

    def test_verify_and_diff_say_by_exit_code_what_they_found(self, out: Path, capsys: Any) -> None:
        first, second = str(step_path(out, 1)), str(step_path(out, 2))
        assert main(["checkpoint", "verify", first]) == 0
        assert main(["checkpoint", "diff", first, first]) == 0
        assert main(["checkpoint", "diff", first, second]) == 1
        damage.truncated(Path(first), Path(second))
        assert main(["checkpoint", "verify", first]) == 1
        assert "is damaged" in capsys.readouterr().out
        assert main(["checkpoint", "diff", first, second]) == 2

    def test_prune_removes_and_says_so(self, out: Path, capsys: Any) -> None:
        assert main(["checkpoint", "prune", str(out), "--keep", "1", "--every", "2"]) == 0
        assert capsys.readouterr().out == "removed step-00000001\n"


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0.0, -0.0), ({"a": None}, {})])
def test_values_that_python_calls_equal_are_told_apart(one: Any, other: Any, tmp_path: Path) -> None:
    for name, value in (("a", one), ("b", other)):
        save(tmp_path / name, extra=value)
    assert diff(tmp_path / "a", tmp_path / "b")
    assert not diff(tmp_path / "a", tmp_path / "a")


def test_settings_of_optimizers_are_compared(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for name, rate in (("a", 0.1), ("b", 0.5)):
        save(tmp_path / name, model, torch.optim.SGD(model.parameters(), lr=rate))
    assert "another setting" in [found.how for found in diff(tmp_path / "a", tmp_path / "b")]

"""The examples run as their first lines say, and find what one device finds: they compare it themselves."""

import contextlib
import io
import os
import runpy
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from shardwright.testing.rank_errors import RankError

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
_LONGEST = 80


def _command(name):
    """What the first line says."""
    first = (ROOT / "examples" / name).read_text().splitlines()[0]
    assert first.startswith("# torchrun ")
    assert first.endswith(f"examples/{name}")
    return first.removeprefix("# ")


def _run(command, folder):
    program, *arguments = shlex.split(command)
    assert program == "torchrun"
    environment = {**os.environ, "EXAMPLE_FOLDER": str(folder), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _printed(path):
    """What an example prints on this rank: the same program, without the start of a process for each rank."""
    out = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(out):
        warnings.simplefilter("default")  # as where it is started
        runpy.run_path(str(path), run_name="__main__")
    return out.getvalue()


def test_an_example_finds_what_one_device_finds(ranks):
    printed = ranks(4, _printed, ROOT / "examples" / "fsdp.py", fresh=True)
    assert [text.count("one device") for text in printed] == [5, 0, 0, 0]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_as_its_first_line_says(name, tmp_path):
    printed = [_run(command, tmp_path) for command in _command(name).split(" && ")]
    assert all(printed)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short(name):
    assert len((ROOT / "examples" / name).read_text().splitlines()) < _LONGEST


def test_an_example_that_finds_another_number_fails(ranks, tmp_path):
    """A planted fault: the loss of one device is compared with twice the loss."""
    text = (ROOT / "examples" / "fsdp.py").read_text()
    wrong = tmp_path / "wrong.py"
    text = text.replace("shard=4", "shard=2").replace("None, 4", "None, 2")
    wrong.write_text(text.replace("assert_close(loss, expected", "assert_close(2 * loss, expected"))
    with pytest.raises(RankError, match="not close"):
        ranks(2, _printed, wrong, fresh=True)

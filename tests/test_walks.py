"""What a call walks through is counted alike in every run, and does not creep."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.walks import ceilings, source
from bench.walks.child import in_a_child
from bench.walks.counting import Count, Entry, count

ROOT = Path(__file__).parent.parent
COUNTED_WITH = torch.__version__.startswith("2.13.") and platform.python_version().startswith("3.11.")
PROGRAM = """
from package.low.table import squares, twice

def sums():
    return sum(squares(3)) + sum([n for n in range(3)]) + (lambda: 1)() + twice(sorted([1]))[0]
"""
TABLE = """
def squares(most):
    for n in range(most):
        yield n * n

def twice(values):
    return values * 2
"""


@pytest.mark.processes
@pytest.mark.skipif(not COUNTED_WITH, reason="the ceilings were counted with torch 2.13 and Python 3.11")
def test_no_walk_is_above_its_ceiling_and_every_run_counts_the_same():
    """Two runs side by side: strings hash otherwise in each, and addresses differ."""
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.walks", "--check", "--ours"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for seed in ("1", "2")
    ]
    told = [run.communicate()[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], told[0]
    assert told[0] == told[1]


def test_entered_frames_of_the_folder_are_counted(tmp_path, monkeypatch):
    """A function, a lambda and a comprehension once; a generator each time that it goes on."""
    package = _package(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    from package import program

    found = count(program.sums, package)
    generator = [Entry("low/table.py", "squares")] * 4
    assert found.entries == [
        Entry("program.py", "sums"),
        *generator,
        Entry("program.py", "sums.<locals>.<listcomp>"),
        Entry("program.py", "sums.<locals>.<lambda>"),
        Entry("low/table.py", "twice"),
    ]
    assert found.numbers == {"calls": 8, "files": 2, "changes": 3}
    assert [(file, calls.total()) for file, calls in found.by_file()] == [
        ("low/table.py", 5),
        ("program.py", 3),
    ]


def test_files_of_one_package_are_one_package():
    files = ("rules/a.py", "rules/views/b.py", "plan/c.py", "plan/c.py")
    assert Count([Entry(file, "f") for file in files]).numbers == {"calls": 4, "files": 3, "changes": 1}


def test_the_source_is_measured_by_lines_and_files(tmp_path):
    _package(tmp_path)
    (tmp_path / "package" / "notes.txt").write_text("no source\n")
    assert source.measure(tmp_path) == {
        "files": 4,
        "lines": (PROGRAM + TABLE).count("\n"),
        "in one folder": 2,
    }


@pytest.mark.processes
def test_a_child_leaves_no_memory_behind():
    known: list[int] = []
    assert [in_a_child(lambda: known.append(1) or len(known)) for _ in range(2)] == [1, 1]
    assert known == []
    with pytest.raises(RuntimeError, match="without an answer"):
        in_a_child(lambda: os._exit(3))


STORED = {"matmul": {"calls": 100, "files": 7}, "other": {"calls": 3}}


def test_a_number_above_its_ceiling_is_named_with_the_difference():
    assert list(ceilings.above({"matmul": {"calls": 100, "files": 7}}, STORED)) == []
    assert list(ceilings.above({"matmul": {"calls": 112, "files": 7}}, STORED)) == [
        "matmul: 112 calls, 12 above the ceiling of 100"
    ]
    assert list(ceilings.above({"new": {"calls": 1}}, STORED)) == ["new: 1 calls, and no ceiling is stored"]


def test_a_number_well_below_its_ceiling_is_told():
    assert list(ceilings.well_below({"matmul": {"calls": 96, "files": 7}}, STORED)) == []
    assert list(ceilings.well_below({"matmul": {"calls": 94, "files": 7}}, STORED)) == [
        "matmul: 94 calls, 6 below the ceiling of 100"
    ]


def test_ceilings_come_down_and_never_go_up(tmp_path):
    found = {"matmul": {"calls": 90, "files": 8}, "source": {"files": 341, "lines": 40_001}}
    lowered = ceilings.lowered(found, STORED)
    assert lowered == {
        "matmul": {"calls": 90, "files": 7},
        "other": {"calls": 3},
        "source": {"files": 350, "lines": 40_500},
    }
    ceilings.write(lowered, tmp_path / "stored.toml")
    assert ceilings.read(tmp_path / "stored.toml") == lowered


def _package(folder: Path) -> Path:
    package = folder / "package"
    (package / "low").mkdir(parents=True)
    for name in ("__init__.py", "low/__init__.py"):
        (package / name).touch()
    (package / "program.py").write_text(PROGRAM)
    (package / "low" / "table.py").write_text(TABLE)
    return package

"""What is a unit test starts no process, and no planted fault is left to the slow tier."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import all_but, one_in, only

ROOT = Path(__file__).parents[2]
TESTS = """
import os, subprocess, sys
import pytest

@pytest.fixture(scope="session")
def rank_pool():
    return None

@pytest.fixture
def ranks(rank_pool):
    return None

def test_pure(): pass
def test_on_ranks(ranks): pass
def test_forgets_the_mark(): subprocess.run([sys.executable, "-c", ""], check=True)
def test_forks(): os.fork() or os._exit(0)

@pytest.mark.processes
def test_has_the_mark(): subprocess.run([sys.executable, "-c", ""], check=True)
"""


def unit_tests(folder: Path, tests: str) -> str:
    """What `pytest -m unit` says of these tests."""
    (folder / "test_these.py").write_text(tests)
    options = ["-p", "tests.tiers", "-p", "no:cacheprovider", "-rA", "-m", "unit"]
    where = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), str(folder)]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *where],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout + run.stderr


@pytest.mark.processes
def test_a_unit_test_starts_no_process(tmp_path):
    """Chosen without being marked; one that starts a process goes red and starts none."""
    said = unit_tests(tmp_path, TESTS)
    found = {name: how for how, name in re.findall(r"^(PASSED|FAILED) \S*::(\w+)", said, re.MULTILINE)}
    assert found == {"test_pure": "PASSED", "test_forgets_the_mark": "FAILED", "test_forks": "FAILED"}, said
    assert "test_forks starts a process (os.fork)" in said
    assert "2 deselected" in said


@pytest.mark.processes
def test_a_fault_that_is_planted_may_not_be_slow(tmp_path):
    tests = "import pytest\n\n@pytest.mark.slow\ndef test_a_planted_fault_goes_red(): pass\n"
    said = unit_tests(tmp_path, tests)
    assert "so it is not slow: ['test_these.py::test_a_planted_fault_goes_red']" in said, said


def test_cases_are_chosen_by_their_number_or_by_name():
    def slow(cases):
        return [case.values for case in cases if case.marks]

    assert slow(one_in(3, "abcd")) == [("b",), ("c",)]
    assert slow(one_in(2, "abcd", first=1)) == [("a",), ("c",)]
    assert slow(only([(1, "b")], [(1, "a"), (1, "b")])) == [(1, "a")]
    assert slow(all_but(["a"], ["a", "b"])) == [("a",)]
    with pytest.raises(ValueError, match="'z'"):
        only(["z"], "abc")

"""What an install brings: the releases of torch that were tried, and one word about any other."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from shardwright.compat import TRIED, warn_if_untried
from tests.programs import Program

ROOT = Path(__file__).parent.parent
UNTRIED = (
    "import torch; torch.__version__ = '2.16.0+cpu'\n"
    "import warnings; warnings.simplefilter('always')\n"
    "import shardwright as sw; sw.Layout; sw.Shard; sw.DTensor\n"
)


def test_an_install_asks_for_the_releases_that_were_tried():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    last = int(TRIED[1].partition(".")[2])
    assert f"torch>={TRIED[0]},<2.{last + 1}" in project["dependencies"]
    readme = (ROOT / "README.md").read_text()
    assert f"torch {TRIED[0]} to {TRIED[1]}" in readme


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cu128", "2.13.0.dev20260101", "2.15.0"])
def test_a_release_that_was_tried_is_taken_in_silence(version):
    warn_if_untried(version)


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0+cpu", "3.0.0a0+git12"])
def test_another_release_is_named(version):
    with pytest.warns(
        UserWarning, match=rf"tried with torch 2.11 to 2.15, this is {version[:6]}.*torch>=2.11,<2.16"
    ):
        warn_if_untried(version)


@pytest.mark.processes
def test_the_import_says_it_once():
    run = Program(UNTRIED).end()
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("shardwright was tried with torch") == 1

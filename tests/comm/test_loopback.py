"""What a network interface counts is what the plans state."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.loopback import Row, namespace_refused

ROOT = Path(__file__).resolve().parents[2]
PAIRS = ("S0 -> S1", "P -> R", "Owner -> R", "P S0 -> S0 R", "Ragged S1 -> ZigZag Owner")


@pytest.mark.slow
@pytest.mark.processes
def test_the_interface_counts_what_the_plans_state():
    """In a namespace of their own 4 ranks send 4 MiB tensors; `python -m bench.loopback` does all pairs."""
    refusal = namespace_refused()
    if refusal:
        pytest.skip(f"no network namespace may be made here: {refusal}")
    options = [option for pair in PAIRS for option in ("--pair", pair)]
    done = subprocess.run(
        [sys.executable, "-m", "bench.loopback", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(PAIRS)} pairs on 4 ranks, 4,194,304 B each: 0 beyond 5%" in done.stdout


@pytest.mark.parametrize(("planned", "counted"), [(1000, 1060.0), (1000, 940.0), (0, 60.0)])
def test_six_percent_more_or_less_is_noticed(planned, counted):
    assert not Row("x", planned, counted, tensor=1000).agrees
    assert Row("x", planned, planned, tensor=1000).agrees

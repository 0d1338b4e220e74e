"""What a run shows: a bar on a terminal, a few plain lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import contextlib
import os
import sys

from shardwright.launch.streams import lasting_streams
from shardwright.train.metrics import StepRecord
from shardwright.train.progress import Display


def record(step: int, held_out: float | None = None) -> StepRecord:
    return StepRecord(step, 2.5, held_out, 0.5, 1e-3, 2.0, 12_345.6, 2_500_000, 1.0)


def test_without_a_terminal_some_steps_become_plain_lines(capsys):
    with Display(100, 8, quiet=False) as display:
        for step in range(1, 101):
            display.show(record(step, 1.875 if step == 7 else None))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 1/100  loss 2.500  held out -  loads 2.00 of 2.08 nats  12,346 tokens/s")
    assert lines[2].startswith("step 7/100  loss 2.500  held out 1.875")
    assert lines[0].endswith("2.5 MB/step")
    assert len(lines) == 22


def test_other_ranks_show_nothing(capsys):
    with Display(2, 8, quiet=True) as display:
        display.show(record(1))
        display.say("hello")
    assert capsys.readouterr().out == ""


def test_streams_outlast_their_reader_their_disk_and_their_alphabet(monkeypatch, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    pipe, narrow = os.fdopen(writer, "w"), (tmp_path / "log").open("w", encoding="ascii")
    full = os.fdopen(os.open(next(filter(os.path.exists, ("/dev/full", os.devnull))), os.O_WRONLY), "w")
    for stream, errors in ((pipe, narrow), (full, None), (None, None)):
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", errors)
        with lasting_streams(), Display(2, 8, quiet=False) as display:
            display.say("lost")
            print("in füll", file=sys.stderr, flush=True)
        assert (sys.stdout, sys.stderr) == (stream, errors)
    pipe.close()  # what it still held is no error at the end either
    with contextlib.suppress(OSError):
        full.close()
    narrow.close()
    assert (tmp_path / "log").read_text() == "in f\\xfcll\n"


def test_on_a_terminal_a_bar_shows_the_last_record(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    with Display(2, 8, quiet=False) as display:
        display.start(0, "a run")
        display.show(record(1))
        display.show(record(2, 1.5))
    assert "1.500" in capsys.readouterr().out

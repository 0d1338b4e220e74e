"""A sample of the corpus is as stored, and what differs is told; `make corpus` runs all of it."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from rich.console import Console

from tests.corpus import stored
from tests.corpus.__main__ import main
from tests.corpus.catalog import every_unit
from tests.corpus.report import changed, show_ops, show_rows
from tests.corpus.row import Row, digests

_ROWS = [
    Row("operators", "add", "f32[4] Shard(0)", "-> f32[4@tp]"),
    Row("operators", "add", "f32[4] Replicate()", "-> f32[4]"),
    Row("views", "view", "f32[4]", "-> f32[2@tp, 2]"),
]


def _sampled():
    dist.destroy_process_group()  # what is forked has a world of its own, or none
    return main(["--sample", "--jobs", "2"])


@pytest.mark.timeout(900)  # 20 s; a machine that is shared may take long
def test_a_sample_of_the_corpus_is_as_stored(ranks):
    """By a rank that never ran anything in parallel: what it forks must not have."""
    if stored.stored_version() != stored.version():
        pytest.skip(f"stored with torch {stored.stored_version()}, whose samples may be others")
    assert ranks(1, _sampled, fresh=True, timeout=600) == [0]


def test_no_op_is_stored_that_is_not_tried():
    if stored.stored_version() != stored.version():
        pytest.skip(f"stored with torch {stored.stored_version()}, which has other ops")
    tried = {(family, unit.op) for unit in every_unit() for family in unit.families}
    assert tried >= set(stored.read())


def test_a_row_that_differs_is_told_with_its_op_and_what_it_was():
    now = [*_ROWS[:2], _ROWS[2]._replace(told="raises LayoutError: no")]
    (op,) = stored.differences(digests(_ROWS), digests(now))
    assert (op.family, op.op) == ("views", "view")
    (row,) = changed(_ROWS, now)
    assert row == (_ROWS[2].key, "-> f32[2@tp, 2]", "raises LayoutError: no")
    console = Console(record=True, width=200)
    show_ops([op], console)
    show_rows([row], 10, console)
    assert "raises LayoutError: no" in console.export_text()


def test_the_order_in_which_rows_are_made_does_not_matter_and_their_text_does():
    known = digests(_ROWS)
    assert digests(_ROWS[::-1]) == known
    assert digests([*_ROWS[:2], _ROWS[2]._replace(told="-> f32[2, 2@tp]")]) != known
    assert len(stored.differences(known, digests(_ROWS[:2]))) == 1, "an op that is gone"
    assert [Row.from_line(str(row)) for row in _ROWS] == _ROWS


def test_what_is_stored_is_read_as_it_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "FILE", tmp_path / "hashes.txt")
    stored.write(digests(_ROWS))
    assert stored.read() == digests(_ROWS)
    assert stored.stored_version() == stored.version()

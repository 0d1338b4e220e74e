"""`sw.guarded()`: ranks that do not do the same hear of it before anything is sent, all of them, soon."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwright.comm.guard import guarded
from shardwright.errors import ConfigError
from tests.programs import Program

from . import guarded_programs as programs

_SOON = 2.0
_ON_ONE_LINE = {
    "an_algorithm_beside_a_plan",
    "a_root_that_gives_other_shapes",
    "a_tensor_of_another_source",
    "a_tensor_of_other_dtype",
    "a_tensor_of_other_shape",
    "calls_of_the_program_itself",
    "lists_that_nobody_takes",
    "other_dtype",
    "other_gather",
    "other_lists_of_all_gather",
    "other_lists_of_reduce_scatter",
    "other_op_in_place_of_its_twin",
    "other_parts_of_a_tensor",
    "other_placement",
    "other_reduce",
    "other_roots",
    "other_scatter",
    "other_shape",
    "other_sizes",
    "rows_that_nobody_takes",
}


def test_every_difference_is_said_on_both_ranks_with_both_lines(ranks):
    both = ranks(2, programs.run_different, timeout=120)
    for name, (text, seconds) in (item for said in both for item in said.items()):
        assert "rank 0" in text, name
        assert "rank 1" in text, name
        assert "are about to run different" in text, name
        assert seconds < _SOON, name
        lines = re.findall(r"guarded_programs\.py:(\d+)", text)
        assert len(lines) == 2, (name, text)
        assert (len(set(lines)) == 1) == (name in _ON_ONE_LINE), text


def test_ranks_that_do_the_same_are_left_alone_also_where_one_is_slow(ranks):
    first, second = ranks(2, programs.run_alike)
    assert first == second > 0


def test_a_rank_that_left_by_an_error_is_not_waited_for(ranks):
    waiting, left = ranks(2, programs.run_error)
    assert "left the guarded block by KeyError" in waiting
    assert left == "KeyError('mine')"


def test_a_rank_that_says_nothing_is_given_up_after_the_patience(ranks):
    waiting, silent = ranks(2, programs.run_silent)
    assert "rank 1 said nothing for 0.2 s while rank 0 waits to run" in waiting
    assert "are about to run different calls" in silent


@pytest.mark.processes
def test_the_environment_guards_a_whole_program_and_its_end(tmp_path):
    environment = {"SHARDWRIGHT_GUARD": "1", "GLOO_SOCKET_IFNAME": "lo"}
    file, store = Path(programs.__file__), str(tmp_path / "store")
    running = [Program(file, store, rank, environment=environment) for rank in "01"]
    for ended in [program.end() for program in running]:
        said = ended.stderr
        assert ended.returncode == 1, said
        assert "are about to run different calls" in said
        assert ": ended" in said
        assert "f32[4@tp, 6] -> f32[4, 6]" in said


def test_off_the_guard_is_not_on_the_way(ranks):
    for files in ranks(2, programs.files_called):
        assert "comm/execute.py" in files
        assert not {"comm/guard.py", "comm/tap.py"}.intersection(files)


@pytest.mark.parametrize("patience", ["x", None, 0, -1.0, float("nan"), True])
def test_a_patience_that_is_no_time_is_refused_before_anybody_waits(patience):
    with (
        pytest.raises(ConfigError, match=r"guarded: patience=.* is no number above 0"),
        guarded(patience=patience),
    ):
        pytest.fail("the block was entered")

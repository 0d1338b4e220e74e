"""Programs that are forked where torch has been imported: what they say, and how they end."""

import pytest

from tests.programs import Program


@pytest.mark.processes
def test_a_program_says_and_ends_as_one_of_its_own() -> None:
    program = "import os, sys; print(*sys.argv, os.environ['X'], 'torch' in sys.modules); sys.exit('no')"
    told = Program(program, "a", environment={"X": "1"}).end()
    assert (told.returncode, told.stdout, told.stderr) == (1, "-c a 1 True\n", "no\n")


@pytest.mark.processes
def test_one_that_goes_on_is_killed() -> None:
    with pytest.raises(TimeoutError, match=r"more than 0.5 s; it said 'begun"):
        Program("import time; print('begun', flush=True); time.sleep(60)").end(0.5)

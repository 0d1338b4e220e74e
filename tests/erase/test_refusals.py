"""Programs that cannot be recorded give the right answers, and the report says why and where."""

import pytest

from .refused import NAMES, is_refused, recurs


@pytest.mark.parametrize("name", NAMES)
def test_a_program_that_cannot_be_recorded_runs_as_it_is(ranks, name):
    ranks(1 if name == "times" else 2, is_refused, name)


def test_a_kernel_that_asks_for_gradients_runs_as_it_is_where_they_are_recorded(ranks):
    ranks(2, recurs)

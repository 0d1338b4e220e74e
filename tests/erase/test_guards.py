"""A recording is replayed only where it holds; without its guard each case goes wrong."""

import pytest

from .guards import CASES, goes_red, holds_true

NAMES = [case.__name__ for case in CASES]


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_that_does_not_hold_is_not_replayed(ranks, name):
    ranks(2, holds_true, name)


@pytest.mark.parametrize("name", NAMES)
def test_without_its_guard_the_case_is_red(ranks, name):
    assert all(ranks(2, goes_red, name))

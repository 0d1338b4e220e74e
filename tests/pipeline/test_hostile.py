"""Random models at random cuts are as one device; `python -m tests.pipeline.hostile` tries more of them."""

from unittest import mock

import pytest

from tests.pipeline.hostile import Trial, trials, try_one
from tests.tiers import one_in

BOUND = 1e-4  # of the largest element


@pytest.mark.parametrize("trial", one_in(13, trials(0, 40)), ids=str)
def test_a_random_model_is_as_on_one_device(ranks, trial):
    assert max(ranks(trial.world, try_one, trial)) <= BOUND


def _spoiled(trial):
    from shardwright.parallel.pipeline import stage

    arriving = stage.arriving
    with mock.patch.object(stage, "arriving", lambda *args: 1.01 * arriving(*args)):
        return try_one(trial)


def test_a_planted_fault_at_the_border_is_found(ranks):
    assert max(ranks(2, _spoiled, Trial(3, 2, "gpipe", 2))) > BOUND

"""Faults that are planted in a pipeline turn the comparison with one device red."""

import contextlib
import dataclasses
from unittest import mock

import pytest

from tests.pipeline.ranks import Case, assert_right, beside_one_device

TIED = Case("tied", {"pp": 2}, steps=1)  # a second step refuses copies that have parted
SHARDED = Case("tied", {"pp": 2, "dp": 2}, ("pipeline", "fsdp"), micro=2, accumulate=2, steps=2)


def _patch(fault):
    from shardwright.grads import clip
    from shardwright.parallel.pipeline import pipeline, ties

    def averaged(self, scale):
        return lambda out, target: self.loss(out, target) / float(scale) / self.micro_batches

    def counted_twice(parameter):
        held = parameter.shared_by_stages
        return dataclasses.replace(held, counts=True)

    def accumulated_twice(self):
        """Sums what was there before too."""
        held = [tie for tie in self._held() if tie.parameter.requires_grad]
        yield
        for tie in held:
            tie.parameter.grad = self._total(tie)

    return {
        "tied gradients are not summed": (
            ties.Ties,
            "_total",
            lambda self, tie: ties._brought(tie.parameter),
        ),
        "micro-batches are averaged": (pipeline.Pipeline, "_scaled", averaged),
        "each stage clips by its own norm": (clip, "_over_stages", lambda power, *_, wide: (power, wide)),
        "tied weights count twice": (clip, "stages_of", counted_twice),
        "an earlier step is summed again": (
            ties.Ties,
            "summed",
            contextlib.contextmanager(accumulated_twice),
        ),
    }[fault]


def _spoiled(case, fault):
    target, name, wrong = _patch(fault)
    with mock.patch.object(target, name, wrong):
        return beside_one_device(case)


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (TIED, "tied gradients are not summed"),
        (TIED, "micro-batches are averaged"),
        (TIED, "each stage clips by its own norm"),
        (TIED, "tied weights count twice"),
        (SHARDED, "an earlier step is summed again"),
    ],
)
def test_a_planted_fault_is_found(ranks, case, fault):
    with pytest.raises(AssertionError):
        assert_right(ranks(case.world, _spoiled, case, fault))

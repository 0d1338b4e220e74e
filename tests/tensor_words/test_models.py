"""Unmodified models, cut by the words that they bring: losses, gradients and steps are one device's."""

import pytest

from tests.compositions import faults

from .programs import BRINGING, ODD, differing

# Name, mesh, what places the parameters over data ranks, cut between blocks.
_SAMPLE = {
    4: [("phi3, odd", (2, 2), "fsdp", True)],
    3: [("gpt_neox, odd", (3,), "", False)],
    2: [("mixtral", (2,), "", True), ("qwen2, tied", (2,), "", True)],
}


def _differing(cases):
    return {case: differing(*case[:3], sequence=case[3]) for case in cases}


@pytest.mark.parametrize("world", _SAMPLE)
def test_a_sample_of_models_trains_as_on_one_device(ranks, world):
    for found in ranks(world, _differing, _SAMPLE[world], timeout=170):
        assert found == {case: [] for case in _SAMPLE[world]}


def _damaged(fault):
    return differing("llama", (2,), "", sequence=True, fault=getattr(faults, fault))


@pytest.mark.parametrize("fault", ["doubled_on_one_rank", "averaged"])
def test_a_planted_fault_goes_red(ranks, fault):
    found = ranks(2, _damaged, fault, timeout=170)
    assert any(line.startswith("gradient of") for lines in found for line in lines)
    assert all(any(line.startswith("parameter") for line in lines) for lines in found)


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("sizes", [(2,), (3,), (4,), (2, 2)], ids=["tp2", "tp3", "tp4", "dp2tp2"])
@pytest.mark.parametrize("name", [*BRINGING, *ODD])
def test_every_model_trains_as_on_one_device(ranks, name, sizes, sequence):
    data = ("replicate", "fsdp") if len(sizes) > 1 else ("",)
    cases = [(name, sizes, how, sequence) for how in data]
    world = sizes[0] * sizes[-1] if len(sizes) > 1 else sizes[0]
    for found in ranks(world, _differing, cases, timeout=170):
        assert found == {case: [] for case in cases}

"""Unmodified models of `transformers` on sequences that are cut, alone and beside other strategies."""

import pytest
import torch

from tests.models.configs import CHOSEN, MORE, TOKENS
from tests.tiers import only

from .meshes import Grid, check_grid
from .models import check

_READERS = [row.name for row in (*CHOSEN, *MORE) if row.reads == TOKENS]
# Rotary and learned positions, windows, experts, an encoder, heads of keys that are compressed.
_SAMPLE = ("llama", "gpt2", "mistral", "mixtral", "deepseek_v3")


def _right(names):
    return {name: [] for name in names}


def _checked(names, length, attention):
    return {name: check(name, length, attention) for name in names}


def test_a_sample_of_models_is_one_device_whatever_the_length(ranks):
    """13 positions over 3 ranks are 3, 5 and 5 of them; 5 over 4 leave one rank without any."""
    some = ("llama",)
    assert ranks(3, _checked, some, 13, "auto", timeout=170) == [_right(some)] * 3
    assert ranks(4, _checked, some[:1], 5, "ring", timeout=170) == [_right(some[:1])] * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", _READERS)
def test_every_model_is_one_device(ranks, name):
    assert ranks(2, check, name, 11, "auto", timeout=170) == [[]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["ring", "all_to_all"])
def test_both_ways_of_attention_in_a_model(ranks, attention):
    assert ranks(2, _checked, _SAMPLE, 12, attention, timeout=170) == [_right(_SAMPLE)] * 2


GRIDS = {
    "cp x tp": ("llama", Grid(("cp", "tp"), (2, 2))),
    "replicate x cp": ("gpt2", Grid(("dp", "cp"), (2, 2), "replicate")),
    "fsdp x cp": ("llama", Grid(("dp", "cp"), (2, 2), "fsdp")),
    "fsdp x cp, checkpointed": ("llama", Grid(("dp", "cp"), (2, 2), "fsdp"), "ring", True),
    "replicate x cp x tp": ("llama", Grid(("dp", "cp", "tp"), (2, 2, 2), "replicate")),
    "fsdp x cp x tp": ("llama", Grid(("dp", "cp", "tp"), (2, 2, 2), "fsdp")),
    "hsdp x cp": ("gpt2", Grid(("dp2", "dp", "cp"), (2, 2, 2), "hsdp"), "all_to_all"),
    "fsdp over dp and cp": ("llama", Grid(("dp", "cp"), (2, 2), "fsdp over all")),
    "fsdp over dp and cp, x tp": ("llama", Grid(("dp", "cp", "tp"), (2, 2, 2), "fsdp over all")),
    "hsdp over dp and cp": ("gpt2", Grid(("dp2", "dp", "cp"), (2, 2, 2), "hsdp over all")),
    "cp x tp, long": ("llama", Grid(("cp", "tp"), (4, 2))),
    "experts, replicate x cp": ("mixtral", Grid(("dp", "cp"), (2, 4), "replicate")),
    "encoder and decoder, fsdp x cp": ("t5", Grid(("dp", "cp"), (2, 4), "fsdp")),
}


@pytest.mark.parametrize("case", only(["fsdp x cp, checkpointed", "fsdp over dp and cp"], GRIDS))
def test_beside_other_strategies_a_model_is_one_device(ranks, case):
    name, grid, *more = GRIDS[case]
    world = int(torch.tensor(grid.sizes).prod())
    assert ranks(world, check_grid, name, grid, *more, timeout=170) == [[]] * world

"""A sample of the zoo, and a fault that it must see; `python -m tests.models.zoo` runs all of it."""

import pytest
import torch

from tests.models.zoo import ways
from tests.models.zoo.tiny import build, kinds
from tests.models.zoo.ways import NO_PLAN, check
from tests.tiers import only

SAMPLE = [
    ("llama", "pipeline"),
    ("olmo3", "tensor, sequence"),
    ("granitemoe", "context"),
    ("gemma2", "pipeline"),
    ("qwen3_next", "tensor"),
    ("deepseek_v3", "context"),
]


@pytest.mark.parametrize(("kind", "way"), only([], SAMPLE))
def test_a_sample_is_one_device(ranks, kind, way):
    assert ranks(2, check, kind, way, timeout=170) == [[]] * 2


def _damaged(kind, way):
    """The model that is cut has one weight that is another."""
    built = iter((False, True))

    def other(kind):
        model = build(kind)
        if next(built):
            with torch.no_grad():
                list(model.parameters())[-1][3] += 0.1
        return model

    ways.build = other
    return check(kind, way)


def test_a_planted_weight_goes_red(ranks):
    for lines in ranks(2, _damaged, "llama", "context", fresh=True):
        assert any("gradient of" in line for line in lines)


def test_what_has_no_plan_says_so(ranks):
    assert ranks(1, check, "gpt2", "tensor") == [[NO_PLAN]]


def test_the_zoo_has_many_kinds():
    assert len(kinds()) > 100

"""Some architectures of `transformers` as they are beside one device; `make models` runs them all."""

import pytest
import torch

from .check import DATA, FSDP, TENSOR, check, compare
from .forms import check_form

# Default attention, grouped experts, a tied head, an encoder that `generate` calls on its own.
_SAMPLE = [("mixtral", DATA), ("qwen3", TENSOR), ("t5", FSDP), ("gpt2", DATA)]
_FORMS = [
    ("llama", "adapters", TENSOR),
    ("llama", "padded left", FSDP),
    ("llama", "scaled", FSDP),
    ("mixtral", "bfloat16", TENSOR),
    ("mixtral", "checkpointed, reentrant", TENSOR),
]


def _checked(cases):
    return {case: check(*case) for case in cases}


def test_a_sample_of_architectures_equals_one_device(ranks):
    for found in ranks(2, _checked, _SAMPLE, timeout=170):
        assert found == {case: [] for case in _SAMPLE}


def _formed(cases):
    return {case: check_form(*case) for case in cases}


def test_a_sample_of_the_ways_to_use_a_model_equals_one_device(ranks):
    for found in ranks(2, _formed, _FORMS, timeout=170):
        assert found == {case: [] for case in _FORMS}


@pytest.mark.parametrize(
    "found",
    [
        {"loss": torch.tensor(1.0), "gradient of w": torch.tensor([1.0, 2.0, 3.001])},
        {"loss": torch.tensor(1.0), "gradient of w": None},
        {"loss": torch.tensor(1.0), "gradient of w": torch.tensor([1.0, 2.0, torch.nan])},
        {"loss": torch.tensor(1.1), "gradient of w": torch.tensor([1.0, 2.0, 3.0])},
        {"loss": torch.tensor(1.0), "gradient of w": torch.tensor([1.0, 2.0, 3.0]).double()},
    ],
)
def test_what_differs_is_said(found):
    wanted = {"loss": torch.tensor(1.0), "gradient of w": torch.tensor([1.0, 2.0, 3.0])}
    assert len(list(compare(found, wanted))) == 1
    assert not list(compare(wanted, wanted))

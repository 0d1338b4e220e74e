"""Models of `transformers` whose vocabulary is cut are replayed as one device trains them."""

from itertools import product

import pytest

from tests.tiers import only

from .models import MODELS, OPTIMIZERS, replayed

# A dense model and one of experts, and each optimizer once.
KEPT = [("Llama", "SGD"), ("Mixtral", "AdamW")]


@pytest.mark.parametrize(("name", "optimizer"), only(KEPT, product(MODELS, OPTIMIZERS)))
def test_steps_of_a_model_whose_vocabulary_is_cut_are_replayed(ranks, name, optimizer):
    """A look-up in cut rows may raise; the model catches errors of other things than operators."""
    for replays, report in ranks(2, replayed, name, optimizer, timeout=120):
        assert replays == 4, report

"""Rules against calls captured from torch's own operator database, forward and backward: a stated sample.

The sample is every twelfth operator, two inputs of each dtype, two calls per overload, two ranks.
`python -m tests.rules` takes all of them.
"""

from __future__ import annotations

import pytest

from shardwright.rules import rule
from shardwright.rules.rule import remove_rule
from tests.rules.catalog import Tally, calls, check_all
from tests.tiers import all_but
from tests.torch_samples import op_db

_EVERY = 12
_PARTS = 4


def _checked(infos, samples):
    tally = Tally()
    for _ in check_all(calls(infos, samples=samples, own=False), tally, per_op=2, worlds=(2,)):
        pass
    return tally


@pytest.mark.parametrize("part", all_but(range(1, _PARTS), range(_PARTS)))
def test_rules_are_true_on_torchs_samples(part: int) -> None:
    tally = _checked(op_db[_EVERY * part :: _EVERY * _PARTS], 2)
    assert not tally.wrong, "\n\n".join(tally.wrong)
    assert sum(1 for cuts in tally.cuts.values() if cuts) > 60 // _PARTS


@pytest.mark.parametrize(
    "kind", all_but(["linalg."], ["linalg.", "fft.", "nn.functional.pad", "nn.functional.max_unpool"])
)
def test_rules_of_whole_matrices_and_images_are_true(kind: str) -> None:
    infos = [info for info in op_db if info.full_name.startswith(kind)]
    tally = _checked(infos[::3], 12)
    assert not tally.wrong, "\n\n".join(tally.wrong)
    assert tally.report.cut > 10


def test_a_wrong_rule_in_the_catalog_is_counted() -> None:
    """Added to the registry, so that the whole run meets it."""
    wrong = rule("aten::cumsum", "... -> ...")
    try:
        infos = [info for info in op_db if info.full_name == "cumsum"]
        assert any("aten::cumsum" in text for text in _checked(infos, 4).wrong)
    finally:
        remove_rule(wrong)

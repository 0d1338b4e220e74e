"""Rules against calls captured from torch's own operator database, forward and backward: a stated sample.

The sample is every twelfth operator, two inputs of each dtype, two calls per overload, two ranks.
"""

from __future__ import annotations

import warnings

import torch
from torch.testing._internal.common_methods_invocations import op_db

from shardwright.rules import rules_of
from shardwright.testing.check_rule import check_rule
from shardwright.testing.simulate import RuleCheckError
from tests.rules.captured import captured_calls

_EVERY = 12


def test_rules_are_true_on_torchs_samples() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated operators warn, and they are in the database too
        calls = captured_calls(op_db[::_EVERY], samples=2)
    wrong: list[str] = []
    checked: set[torch._ops.OpOverload] = set()
    for op, samples in calls.items():
        if not rules_of(op):
            continue
        for sample in samples[:2]:
            try:
                checked.update([op] if check_rule(op, [sample], worlds=(2,)).cut else [])
            except RuleCheckError as error:
                if "nothing was tested" not in str(error):
                    wrong.append(str(error))
    assert not wrong, "\n\n".join(wrong)
    assert len(checked) > 60

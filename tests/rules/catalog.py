"""The whole catalog of rules through the checker, on calls of torch's own database, forward and backward."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

from shardwright.rules import registry, rules_of
from shardwright.testing.check_rule import RuleReport, check_rule
from shardwright.testing.simulate import RuleCheckError, Sample
from tests.rules.captured import captured_calls
from tests.rules.samples import SAMPLES, samples_of

Overload = torch._ops.OpOverload


@dataclass
class Tally:
    """What was checked: by overload the number of cuts tried, and the texts of what is wrong."""

    cuts: dict[Overload, int] = field(default_factory=dict)
    report: RuleReport = field(default_factory=RuleReport)
    wrong: list[str] = field(default_factory=list)

    def unseen(self) -> list[str]:
        """Rules of the catalog that no call exercised."""
        seen = {entry for op, cuts in self.cuts.items() if cuts for entry in rules_of(op)}
        return sorted({entry.op for entry in registry.registry if entry not in seen})


def calls(infos: Sequence[Any] = op_db, *, samples: int, own: bool = True) -> dict[Overload, list[Sample]]:
    """Calls by overload: those of torch's database, and (`own`) ours in two profiles of sizes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated operators warn, and they are in the database too
        found = captured_calls(infos, samples=samples)
    for op in SAMPLES if own else ():
        written = [s if isinstance(s, Sample) else Sample(s) for s in samples_of(op)]
        found[op] = [*written, *found.get(op, [])]
    return found


def check_all(
    found: dict[Overload, list[Sample]], tally: Tally, *, per_op: int, worlds: Sequence[int]
) -> Iterator[Overload]:
    """Check every overload that has a rule on up to `per_op` of its calls; yields each when it is done."""
    for op, samples in found.items():
        if rules_of(op):
            for sample in _chosen(samples, per_op):
                _check(op, sample, tally, worlds)
        yield op


def _chosen(samples: list[Sample], count: int) -> list[Sample]:
    """The first ones, and those whose tensors have most dims: there is more to cut."""
    richest = sorted(samples, key=lambda s: -sum(x.dim() for x in tree_leaves(s.args) if _is_tensor(x)))
    both = [*richest[: count - count // 2], *samples[: count // 2]]
    return list({id(sample): sample for sample in both}.values())


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _check(op: Overload, sample: Sample, tally: Tally, worlds: Sequence[int]) -> None:
    tally.cuts.setdefault(op, 0)
    try:
        report = check_rule(op, [sample], worlds=worlds)
    except RuleCheckError as error:
        if "nothing was tested" not in str(error):
            tally.wrong.append(str(error))
        return
    tally.report += report
    tally.cuts[op] += report.cut

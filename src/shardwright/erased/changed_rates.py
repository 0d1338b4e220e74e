"""Which numbers a recording did not hold for, if they can be followed (`rates.py`).

Only torch's own optimizers without hooks of their own, in programs that never name their groups: what they
read of a group beside the step would be the number of one day.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardwright.erased.facts import Fact
from shardwright.erased.holds import has_changed
from shardwright.erased.rates import Rate, may_name


def rates_that_changed(
    facts: Iterable[Fact], optimizers: Iterable[torch.optim.Optimizer], named: frozenset[str]
) -> list[Rate]:
    """What a recording did not hold for, if that is nothing but numbers that can be followed; else nothing.

    Args: facts, optimizers: of the recording. named: the names and texts in the program's own code.
    """
    facts, optimizers = list(facts), list(optimizers)
    groups = {id(group): (group, each) for each in optimizers for group in each.param_groups}
    theirs = {id(each.param_groups) for each in optimizers}
    if any(id(f.value) in groups and id(f.holder) not in theirs for f in facts):
        return []  # the program holds a group itself: it may read the number under no name
    found = []
    for fact in filter(has_changed, facts):
        group, optimizer = groups.get(id(fact.holder), (None, None))
        if group is None or optimizer is None or type(fact.value) is not float:
            return []
        rate = Rate(optimizer, group, fact.key)
        if type(group.get(fact.key)) is not float or may_name([rate], named) or not _can_follow(optimizer):
            return []
        found.append(rate)
    return found


def _can_follow(optimizer: torch.optim.Optimizer) -> bool:
    of_torch = f"{type(optimizer).__module__}.".startswith("torch.optim.")  # some tell the package alone
    return of_torch and not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)

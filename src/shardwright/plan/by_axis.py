"""A redistribution as a chain of plans that cross one axis each.

More bytes than the direct plan, but every collective has the group of an axis: what a traced graph needs,
where messages between pairs of ranks cannot stand.
"""

from __future__ import annotations

from itertools import pairwise

from shardwright.errors import PlanError
from shardwright.layout.layout import Layout
from shardwright.placement.base import Replicate
from shardwright.plan.decide import plan_redistribution
from shardwright.plan.plan import Plan


def plans_by_axis(plan: Plan) -> tuple[Plan, ...]:
    """The same redistribution through layouts with one more replicated axis each, innermost axis first.

    Raises: PlanError: Pendings that do not commute must be reduced together.
    """
    crossed = {axis for step in plan.steps for axis in step.axes}
    layouts: list[Layout] = [plan.source]
    for axis in reversed(plan.source.order):
        if axis in crossed:
            layouts.append(layouts[-1].with_placements({plan.source.axes[axis]: Replicate()}))
    layouts.append(plan.target)
    plans = tuple(plan_redistribution(a, b) for a, b in pairwise(layouts))
    if any(single.crosses_several_axes for single in plans):
        raise PlanError(
            f"{plan.source} -> {plan.target} crosses several axes at once, which a traced graph cannot: "
            "redistribute before the compiled function"
        )
    return plans

"""A redistribution as a chain of plans that cross one axis each.

More bytes than the direct plan, but every collective has the group of an axis: what a traced graph needs,
where messages between pairs of ranks cannot stand.
"""

from __future__ import annotations

from shardwright.layout.layout import Layout
from shardwright.placement.base import Partition, Placement, Replicate
from shardwright.placement.made_by_views.joint import Joint, joint_groups
from shardwright.placement.made_by_views.together import Together
from shardwright.plan.decide import plan_redistribution
from shardwright.plan.plan import Plan


def plans_by_axis(plan: Plan) -> tuple[Plan, ...]:
    """The same redistribution, its innermost axis gathered first, until what is left crosses one axis."""
    plans: list[Plan] = []
    left = plan
    while left.crosses_several_axes:
        plans.append(_first_gather(left))
        left = plan_redistribution(plans[-1].target, plan.target)
    return (*plans, left)


def _first_gather(plan: Plan) -> Plan:
    """Gather the innermost of the axes that are crossed, or the one that cuts what it leaves."""
    source = plan.source
    gather = plan_redistribution(source, _without(source, _innermost(plan)))
    if not gather.crosses_several_axes:
        return gather
    last = [axis for step in source.applied if step.partition is not None for axis in step.axes][-1]
    return plan_redistribution(source, _without(source, last))


def _innermost(plan: Plan) -> int:
    """The last axis to act of those that are crossed.

    Of axes that cut together all are, and then what cuts what they leave.
    """
    crossed = {axis for step in plan.steps for axis in step.axes}
    axes: list[int] = []
    torn = False
    for step in plan.source.applied:
        if crossed & set(step.axes) or (torn and step.partition is not None):
            axes += step.axes
            torn = torn or len(step.axes) > 1
    return axes[-1]


def _without(layout: Layout, axis: int) -> Layout:
    """The layout with this axis replicated, the innermost one where several cut together."""
    changed: dict[str, Placement] = {layout.axes[axis]: Replicate()}
    cut = layout.placements[axis]
    group = next((group for group in joint_groups(layout.placements) if axis in group), ())
    if isinstance(cut, Joint) and len(group) > 1:
        left: Partition = Together(cut.partition, cut.sizes[-1])
        for index, other in enumerate(group[:-1]):
            kept = left if len(group) == 2 else Joint(left, cut.sizes[:-1], index)
            changed[layout.axes[other]] = kept
    return layout.with_placements(changed)

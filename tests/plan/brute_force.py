"""The least that must cross between ranks, counted element by element: no formula, no planner."""

from __future__ import annotations

import torch

from shardwright.layout.layout import Layout
from shardwright.plan.holders import Coords, every_coords


def holders(layout: Layout) -> dict[Coords, set[int]]:
    """Which logical elements (flat numbers) each rank holds, or holds a term of."""
    numbers = torch.arange(layout.numel).view(layout.shape)
    return {
        coords: {int(i) for box in layout.region(coords).boxes for i in numbers[box.slices].reshape(-1)}
        for coords in every_coords(layout.sizes)
    }


def least_elements(source: Layout, target: Layout) -> int:
    """For targets without Pending: the messages of one element that no plan can do without.

    Before the first rank has an element complete, a message arrives from each term but its own; every other
    rank that wants the element and does not hold it complete needs one more.
    """
    terms = 1
    for axis in source.pending_axes:
        terms *= source.sizes[axis]
    held, wanted = holders(source), holders(target)
    total = 0
    for element in range(source.numel):
        has = {coords for coords, elements in held.items() if element in elements}
        wants = {coords for coords, elements in wanted.items() if element in elements}
        if terms == 1:
            total += len(wants - has)
        else:
            total += (terms - 1 if wants & has else terms) + len(wants) - 1
    return total

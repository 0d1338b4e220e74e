"""The laws that the full run checks, each on one draw; a broken one raises with everything to repeat it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwright.errors import PlanError
from shardwright.layout.layout import Layout
from shardwright.placement import Pending, Placement, Replicate
from shardwright.plan import plan_redistribution
from shardwright.testing.placement_laws import close
from tests.laws.draws import MESHES, Draw, draw, kinds, name_of, sequence, small, tolerance
from tests.plan.lockstep import Lockstep, held_by_all


class BrokenLawError(Exception):
    """A law does not hold for one draw."""


@dataclass
class Tally:
    """How often each placement was checked, per law; `cases` counts the checks themselves."""

    cases: Counter[str] = field(default_factory=Counter)
    placements: Counter[tuple[str, str]] = field(default_factory=Counter)
    pairs: set[tuple[str, str]] = field(default_factory=set)

    def add(self, law: str, *layouts: Layout) -> None:
        """Count one check of a law."""
        self.cases[law] += 1
        names = {name_of(p) for layout in layouts for p in layout.placements}
        self.placements.update((law, name) for name in names)


class CannotBeTarget(Pending):
    """Says that nothing can be made it: redistribution towards it is refused by name."""

    can_be_target = False

    def combine(self, terms):
        return torch.stack(list(terms)).sum(0)


def round_trips(rng: random.Random, tally: Tally) -> Iterator[None]:
    """`full_tensor(distribute(x)) == x` without end, every shipped placement in turn.

    Every tenth goes through the plan that `full_tensor` runs, with all ranks in lockstep; the others through
    `Layout.join`, which knows nothing of plans.
    """
    while True:
        drawn = draw(rng)
        for placement in kinds(rng, drawn.full, drawn.mesh.sizes[0]):
            layout = sequence(rng, drawn, placement)
            locals_ = held_by_all(layout, drawn.full)
            for rank, local in zip(layout.ranks, locals_, strict=True):
                _check_shape(layout, rank, local)
            _check_value(drawn, layout.join(locals_), layout)
            if tally.cases["round trips"] % 10 == 0 and small(drawn):
                whole = drawn.layout([Replicate()] * len(layout.axes))
                for full in Lockstep(plan_redistribution(layout, whole)).run(locals_):
                    _check_value(drawn, full, layout)
                tally.add("of these through a plan", layout)
            tally.add("round trips", layout)
            yield


def redistributions(rng: random.Random, tally: Tally) -> Iterator[None]:
    """`redistribute(a -> b)` without end: all ordered pairs of the placements of a draw, in rounds.

    On one axis the pair is (a, b); on several, a and b stand somewhere in random sequences.
    """
    while True:
        drawn = draw(rng, rng.choice(MESHES))
        if not small(drawn):
            continue
        choices = kinds(rng, drawn.full, drawn.mesh.sizes[0])
        for first in choices:
            for second in choices:
                _redistribution(rng, tally, drawn, first, second)
                yield


def _redistribution(
    rng: random.Random, tally: Tally, drawn: Draw, first: Placement, second: Placement
) -> None:
    source, target = sequence(rng, drawn, first), sequence(rng, drawn, second)
    plan = plan_redistribution(source, target)
    run = Lockstep(plan)
    results = run.run(held_by_all(source, drawn.full))
    for rank, local in zip(target.ranks, results, strict=True):
        _check_shape(target, rank, local)
    _check_value(drawn, target.join(results), source, target)
    if not source.pending_axes:
        _check_locals(source, target, results, drawn.full)
    if not run.bytes_sent == plan.total_bytes >= plan.lower_bound:
        raise BrokenLawError(f"{run.bytes_sent} bytes were sent by\n{plan}")
    tally.add("redistributions", source, target)
    tally.pairs.add((name_of(first), name_of(second)))


def refusals(rng: random.Random, tally: Tally) -> Iterator[None]:
    """A Pending that cannot be a target is refused by name, wherever one comes from."""
    while True:
        drawn = draw(rng)
        for placement in kinds(rng, drawn.full, drawn.mesh.sizes[0]):
            source = sequence(rng, drawn, placement)
            axis = rng.randrange(len(source.axes))
            placements = [*source.placements]
            placements[axis] = CannotBeTarget()
            _expect_refusal(source, drawn.layout(placements))
            tally.add("refused by name", source)
            yield


def _expect_refusal(source: Layout, target: Layout) -> None:
    try:
        plan = plan_redistribution(source, target)
    except PlanError as error:
        if "CannotBeTarget" in str(error):
            return
        raise
    raise BrokenLawError(f"a Pending that cannot be a target was made one:\n{plan}")


def _check_shape(layout: Layout, rank: int, local: Tensor) -> None:
    wanted, found = (
        (layout.dtype, layout.local_shape(layout.coords_of(rank))),
        (local.dtype, tuple(local.shape)),
    )
    if found != wanted:
        raise BrokenLawError(f"{layout!r}: rank {rank} holds {found}, not {wanted}")


def _check_value(drawn: Draw, found: Tensor, *layouts: Layout) -> None:
    ulps = tolerance(*layouts)
    if found.shape != drawn.full.shape or not close(found, drawn.full, ulps):
        words = " -> ".join(map(repr, layouts))
        raise BrokenLawError(f"{words}:\nthe value is {found}\nit must be {drawn.full} within {ulps} ulp")


def _check_locals(source: Layout, target: Layout, results: list[Tensor], full: Tensor) -> None:
    """Between partitions and Replicate: bit for bit what each rank has to hold."""
    if target.pending_axes:
        return
    for local, wanted in zip(results, held_by_all(target, full), strict=True):
        if not torch.equal(local, wanted):
            raise BrokenLawError(f"{source!r} -> {target!r}: {local} in place of {wanted}")


LAWS: dict[str, Callable[[random.Random, Tally], Iterator[None]]] = {
    "round trips": round_trips,
    "redistributions": redistributions,
    "refused by name": refusals,
}

"""`python -m tests.plan.all_pairs`: the byte law over all ordered pairs of layouts, at full size.

Of every pair the plan moves the least that must cross between ranks, in at most two rounds; the least is
counted from what the ranks hold, element by element, knowing no formula and no planner. A plan of more bytes
says so and stays within 1.5; below 256 KiB per rank one round of more bytes may replace two of fewer.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch

from shardwright.layout.layout import Layout
from shardwright.placement import Interleaved, Owner, Partial, Placement, Ragged, Replicate, Shard, ZigZag
from shardwright.plan import plan_redistribution
from shardwright.plan.holders import every_coords
from tests.plan.kinds import mesh_shape, small_integers
from tests.plan.lockstep import Lockstep, held_by_all

MESHES = ((4,), (2, 2), (2, 3), (2, 2, 2))
SHAPES = ((1024, 1024), (1021, 1022), (7, 3), (0, 5))
SMALL = 256 * 1024  # bytes of a rank's messages below which more bytes may be sent
MOST = 1.5


class BrokenByteLawError(Exception):
    """The plan of one pair does not move what the law says."""


def kinds(n: int) -> list[Placement]:
    """The placements of the law, for an axis of size n."""
    uneven = Ragged((*range(1, n), n + 1), (0,))
    return [Replicate(), Shard(0), Shard(1), Partial(), Interleaved(0, 2), uneven, Owner(n - 1), ZigZag(0)]


def all_layouts(sizes: tuple[int, ...], shape: tuple[int, ...]) -> list[Layout]:
    """Every combination of the placements, one per axis."""
    mesh = mesh_shape(sizes)
    choices = itertools.product(*(kinds(n) for n in sizes))
    return [Layout(mesh, choice, shape, dtype=torch.float32) for choice in choices]


# --------------------------------------------------------------------------- who holds what, by looking


@dataclass
class Holdings:
    """Who holds each element under each layout: ranks as bits, for each class of elements that are alike."""

    sizes: tuple[int, ...]
    layouts: list[Layout]
    masks: np.ndarray  # [layouts, classes]
    weights: np.ndarray  # elements of each class

    @classmethod
    def of(cls, layouts: list[Layout]) -> Holdings:
        """Split a tensor of numbers under every layout and see where each number is."""
        found: dict[tuple[Placement, ...], np.ndarray] = {}
        for layout in layouts:
            held = tuple(Replicate() if p.is_pending else p for p in layout.placements)
            if held not in found:
                found[held] = _seen(layout.with_placements(held))
        distinct = np.stack(list(found.values()))
        # Elements that no layout tells apart are counted together: equal columns have equal hashes.
        mix = np.random.default_rng(0).integers(1, 2**63, size=len(distinct), dtype=np.uint64) | np.uint64(1)
        hashes = sum(
            (row.astype(np.uint64) + np.uint64(7)) ** 3 * k for row, k in zip(distinct, mix, strict=True)
        )
        _, first, weights = np.unique(hashes, return_index=True, return_counts=True)
        compact = dict(zip(found, distinct[:, first], strict=True))
        masks = [
            compact[tuple(Replicate() if p.is_pending else p for p in one.placements)] for one in layouts
        ]
        return cls(layouts[0].sizes, layouts, np.stack(masks), weights)

    def least(self, index: int) -> np.ndarray:
        """The fewest elements that must cross from one layout to every other.

        A Pending that both have is a batch: what happens once per coordinate of its axis. One that only the
        target has needs each element on one coordinate of its axis, whichever is best.
        """
        source, out = self.layouts[index], np.zeros(len(self.layouts), dtype=np.int64)
        by_pending: dict[frozenset[int], list[int]] = {}
        for i, target in enumerate(self.layouts):
            by_pending.setdefault(frozenset(target.pending_axes), []).append(i)
        before = frozenset(source.pending_axes)
        for after, targets in by_pending.items():
            kept, made = sorted(before & after), sorted(after - before)
            terms = prod(self.sizes[axis] for axis in before - after)
            table = _messages(terms, prod(self.sizes))
            cost = None
            for chosen in itertools.product(*(range(self.sizes[axis]) for axis in made)):
                there = self._ranks(dict(zip([*kept, *made], [0] * len(kept) + list(chosen), strict=True)))
                here = self._ranks(dict.fromkeys(kept, 0))
                each = table[self.masks[index] & here, self.masks[targets] & there]
                cost = each if cost is None else np.minimum(cost, each)
            out[targets] = prod(self.sizes[axis] for axis in kept) * (cost @ self.weights)
        return out

    def _ranks(self, fixed: dict[int, int]) -> int:
        """The ranks with these coordinates, as bits."""
        return sum(
            1 << rank
            for rank, coords in enumerate(every_coords(self.sizes))
            if all(coords[axis] == at for axis, at in fixed.items())
        )


def _seen(layout: Layout) -> np.ndarray:
    numbers = torch.arange(layout.numel, dtype=torch.int32).view(layout.shape)
    mask = np.zeros(layout.numel, dtype=np.uint8)
    for rank, coords in enumerate(every_coords(layout.sizes)):
        mask[layout.split(numbers, coords).reshape(-1).numpy()] |= np.uint8(1 << rank)
    return mask


def _messages(terms: int, ranks: int) -> np.ndarray:
    """Messages of one element, by who has it (or a term of it) and who wants it.

    Of one term: everybody who wants it and has it not. Of several: those that the first rank needs to have
    it complete, and one for every other rank that wants it.
    """
    sets = np.arange(1 << ranks)
    has, wants = sets[:, None], sets[None]
    if terms == 1:
        return np.bitwise_count(wants & ~has).astype(np.int64)
    first = np.where(has & wants, terms - 1, terms)
    return np.where(wants > 0, first + np.bitwise_count(wants).astype(np.int64) - 1, 0)


# --------------------------------------------------------------------------------------- what plans say


@dataclass
class Tally:
    """What was checked: pairs per reason of the plan, and the largest bytes over the least per reason."""

    pairs: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)
    run: int = 0

    def add(self, other: Tally) -> None:
        """Join what another process checked."""
        self.pairs += other.pairs
        self.run += other.run
        for reason, ratio in other.worst.items():
            self.worst[reason] = max(ratio, self.worst.get(reason, 0))


def check(source: Layout, target: Layout, least: int, tally: Tally, *, run: bool = False) -> None:
    """Check the law on one pair; with `run`, also that the messages are what the plan says, with the values.

    Raises: BrokenByteLawError: the law does not hold.
    """
    plan = plan_redistribution(source, target)
    least_bytes = least * source.itemsize
    ratio = plan.total_bytes / least_bytes if least_bytes else 1.0 + plan.total_bytes
    small = plan.total_bytes <= SMALL * prod(source.sizes) and "more bytes" in plan.reason
    says_so = "times the fewest bytes" in plan.reason and ratio <= MOST
    if plan.lower_bound != least_bytes or plan.rounds > 2 or not (ratio == 1 or small or says_so):
        raise BrokenByteLawError(f"the least is {least_bytes} B, the ratio {ratio:.3f}:\n{plan}")
    reason = "more bytes than the least, and says so" if says_so and ratio > 1 else plan.reason.split(",")[0]
    tally.pairs[reason] += 1
    tally.worst[reason] = max(ratio, tally.worst.get(reason, 0))
    if run:
        _run(source, target)
        tally.run += 1


def _run(source: Layout, target: Layout) -> None:
    plan = plan_redistribution(source, target)
    full = small_integers(source.shape, source.dtype)
    lockstep = Lockstep(plan)
    results = lockstep.run(held_by_all(source, full))
    if lockstep.bytes_sent != plan.total_bytes or not torch.equal(target.join(results), full):
        raise BrokenByteLawError(f"{lockstep.bytes_sent} B were sent, or the value is wrong:\n{plan}")


def check_all(
    layouts: list[Layout], sources: Iterable[int], holdings: Holdings, run_every: int, seed: int = 0
) -> Tally:
    """Check the pairs of some sources with all layouts; one pair of `run_every` (0: none) is run as well."""
    tally, draw = Tally(), random.Random(seed)
    for index in sources:
        least = holdings.least(index)
        for target, fewest in zip(layouts, least.tolist(), strict=True):
            run = bool(run_every) and draw.randrange(run_every) == 0
            check(layouts[index], target, fewest, tally, run=run)
    return tally


_WORK: tuple[list[Layout], Holdings, int] | None = None


def _chunk(sources: Sequence[int]) -> Tally:
    assert _WORK is not None
    layouts, holdings, run_every = _WORK
    return check_all(layouts, sources, holdings, run_every, seed=sources[0])


def sweep(sizes: tuple[int, ...], shape: tuple[int, ...], processes: int, run_every: int) -> Tally:
    """All ordered pairs on one mesh with one shape."""
    global _WORK  # noqa: PLW0603 - the forked processes inherit it
    layouts = all_layouts(sizes, shape)
    _WORK = layouts, Holdings.of(layouts), run_every
    chunks = [range(i, min(i + 8, len(layouts))) for i in range(0, len(layouts), 8)]
    tally = Tally()
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for done in pool.imap_unordered(_chunk, chunks):
            tally.add(done)
    return tally


def main() -> int:
    """Parse which meshes and shapes, and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.plan.all_pairs", description=__doc__)
    parser.add_argument("--mesh", action="append", help="2x3, for example; default all", default=[])
    parser.add_argument("--shape", action="append", help="7x3, for example; default all", default=[])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--run-every", type=int, default=0, help="also run one pair of so many; 0: by size")
    options = parser.parse_args()
    torch.set_num_threads(1)
    whole, started = Tally(), time.monotonic()
    for sizes in [_numbers(text) for text in options.mesh] or MESHES:
        for shape in [_numbers(text) for text in options.shape] or SHAPES:
            before = time.monotonic()
            run_every = options.run_every or (100 if prod(shape) < 1000 else 2000)
            try:
                tally = sweep(sizes, shape, options.processes, run_every)
            except BrokenByteLawError as error:
                print(f"the byte law is broken on mesh {sizes}, shape {shape}: {error}")
                return 1
            whole.add(tally)
            print(
                f"mesh {sizes} shape {shape}: {sum(tally.pairs.values())} pairs hold, {tally.run} were run, "
                f"in {time.monotonic() - before:.0f} s",
                flush=True,
            )
    for reason, count in whole.pairs.most_common():
        print(f"{count:>9} pairs, at most {whole.worst[reason]:.2f} times the least: {reason}")
    print(f"the byte law holds on {sum(whole.pairs.values())} pairs, in {time.monotonic() - started:.0f} s")
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("x"))


if __name__ == "__main__":
    sys.exit(main())

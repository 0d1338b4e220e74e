"""What `bench.checkpoint` found, as lines of a table: each ratio beside its goal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Protocol

_MIB = 1 << 20
# Ours, beside what, at most.
_RATIOS = (
    ("save", "raw write", 1.4),
    ("save", "DCP save", 0.6),
    ("save", "save, again", None),
    ("async_save, stall", "save", 0.1),
    ("load", "raw read", 1.5),
    ("load", "DCP load", 0.6),
    ("load", "load, again", None),
    ("load in place", "raw read", None),
    ("load in place", "DCP load", None),
)
_EACH = 0.05  # ms of a small tensor
_READ = 1.05  # of what a rank needs
_PEAKS = {"load": 1.0, "load in place": 0.0}  # memory beside the model, in parts of what a rank holds
_LITTLE = 64 << 20


class Found(Protocol):
    """What one rank has found."""

    times: dict[str, list[float]]
    work: dict[str, list[float]]
    read: int
    held: int
    peaks: dict[str, int]


def report(found: Sequence[Found], mib: int, count: int | None) -> None:
    """Print it."""
    names = found[0].times
    times = {name: _over_ranks(max, [one.times[name] for one in found]) for name in names}
    works = {name: _over_ranks(sum, [one.work[name] for one in found]) for name in names}
    what = f"{count} tensors" if count else f"{mib} MiB"
    print(f"{what} on {len(found)} ranks, medians of {len(times['save'])} turns")
    for name, taken in times.items():
        print(f"  {name:18} {median(taken) * 1e3:9.1f} ms   processor {median(works[name]) * 1e3:9.1f} ms")
    for ours, other, of_large in _RATIOS:
        goal = None if count else of_large
        ratio, work = (_ratio(one[ours], one[other]) for one in (times, works))
        print(f"  {f'{ours} / {other}':34} {ratio:6.2f}   processor {work:6.2f}{_goal(goal)}")
    slower = _ratio(times["async_save, steps"], times["steps alone"])
    print(f"  {'steps while it saves / alone':34} {slower:6.2f}   (with the stall)")
    if count:
        for name in ("save", "load"):
            each = median(times[name]) / count * 1e3
            print(f"  {f'{name}, each tensor':34} {each:6.3f} ms{_goal(_EACH)}")
    read = max(one.read / one.held for one in found)
    print(f"  {'bytes read by a rank / needed':34} {read:6.4f}{_goal(None if count else _READ)}")
    for name, part in _PEAKS.items():
        most = max(one.peaks[name] for one in found) / _MIB
        limit = (part * found[0].held + (_LITTLE if not part else 0)) / _MIB
        print(f"  {f'memory of a {name}, MiB':34} {most:6.1f}{_goal(None if count else limit)}")


def _over_ranks(how: Callable[[Iterable[float]], float], turns: Sequence[Sequence[float]]) -> list[float]:
    return [how(turn) for turn in zip(*turns, strict=True)]


def _ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    return median(a / b for a, b in zip(ours, others, strict=True))


def _goal(limit: float | None) -> str:
    return "" if limit is None else f"   <= {limit:g}"

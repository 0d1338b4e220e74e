"""One redistribution on real ranks: ours and torch's in turn, and what each sends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import tensor as theirs

import shardwright as sw
from bench.pairs import Pair, placements
from bench.peer_bytes import bytes_sent
from shardwright.show import trace
from shardwright.testing import rank_mesh

_NATIVE = (["all_reduce"], ["all_gather"])


@dataclass(frozen=True)
class RankResult:
    """One rank's seconds per call, a list per program with one entry per turn; bytes; and how ours moves."""

    ours: list[float]
    theirs: list[float]
    sent_by_torch: float
    planned: int
    least: int
    collectives: list[str]

    @property
    def is_bare_collective(self) -> bool:
        """True if ours is the backend's own gather or all-reduce: nothing to be faster with."""
        return self.collectives in _NATIVE


def measure(pair: Pair, shape: tuple[int, int], turns: int, calls: int) -> RankResult:
    """Time a pair on this rank: programs take turns, every call starts at a barrier.

    Raises: AssertionError: the two results differ.
    """
    logging.disable(logging.WARNING)  # torch tells each rank that it has no all-to-all on CPU
    mesh = rank_mesh(pair.sizes, tuple(f"a{i}" for i in range(len(pair.sizes))))
    x = torch.arange(shape[0] * shape[1], dtype=torch.float32).remainder_(1021).view(shape)
    ours, peer = (_made(library, mesh, x, pair.source) for library in (sw, theirs))
    del x
    programs = [
        _program(ours, mesh, placements(sw, pair.target)),
        _program(peer, mesh, placements(theirs, pair.target)),
    ]
    mine, other = (program() for program in programs)
    assert torch.equal(mine.to_local(), other.to_local()), str(pair)
    del mine, other
    with trace() as seen:
        programs[0]()
    sent = bytes_sent(programs[1])
    plan = sw.plan_redistribution(
        sw.layout_of(ours), sw.layout_of(ours).with_placements(placements(sw, pair.target))
    )
    times = _take_turns(programs, turns, calls)
    return RankResult(
        *times, sent, plan.total_bytes, plan.lower_bound, [event.op for event in seen.collectives]
    )


def _program(x: Any, mesh: Any, target: list[object]) -> Callable[[], Any]:
    return lambda: x.redistribute(mesh, target)


def _take_turns(programs: list[Callable[[], object]], turns: int, calls: int) -> tuple[list[float], ...]:
    """Seconds per call; which program begins changes every turn."""
    seconds: tuple[list[float], ...] = tuple([] for _ in programs)
    for turn in range(turns):
        for step in range(len(programs)):
            index = (turn + step) % len(programs)
            seconds[index].append(sum(_timed(programs[index]) for _ in range(calls)) / calls)
    return seconds


def _timed(program: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    program()
    return time.perf_counter() - start


def _made(library: Any, mesh: Any, x: torch.Tensor, names: tuple[str, ...]) -> Any:
    """A DTensor of these placements; where it is to be summed, every rank's term is the same."""
    finished = tuple("R" if name == "P" else name for name in names)
    x = library.distribute_tensor(x, mesh, placements(library, finished))
    return library.DTensor.from_local(
        x.to_local().clone(), mesh, placements(library, names), shape=x.shape, stride=x.stride()
    )

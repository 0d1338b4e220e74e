"""What a step of a sharded decoder puts on the wire, ours and torch's, counted by the network interface."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import Tensor

from bench.data_parallel import OURS, THEIRS, given
from bench.loopback import run_alone_on_loopback, sent_by
from shardwright.testing import RankPool

_STEPS = 4


def run() -> int:
    """Print bytes of a step, over all ranks, for FSDP and HSDP on 2 and 4 ranks."""
    code = run_alone_on_loopback("bench", ["wire", *sys.argv[2:]])
    if code is not None:
        return code
    for name, ranks in (("fsdp", 2), ("fsdp", 4), ("hsdp", 4)):
        with RankPool() as pool:
            mine, other = (_of_a_step(partial(pool.run, ranks, steps, name, ours)) for ours in (True, False))
        print(
            f"{name}, {ranks} ranks: {mine / 2**20:.2f} MiB a step beside {other / 2**20:.2f} "
            f"({mine / other:.2f})"
        )
    return 0


def _of_a_step(program: Callable[[int], object]) -> float:
    """Bytes of one step: what making the model and the first one send is taken off."""
    few = sent_by(lambda: program(1))
    return (sent_by(lambda: program(1 + _STEPS)) - few) / _STEPS


def steps(name: str, ours: bool, count: int) -> None:
    """Make a model and run steps."""
    mesh, rows, _ = given(name)
    step: Callable[[], Tensor] = (OURS if ours else THEIRS)[name](mesh, rows)
    for _ in range(count):
        step()
    dist.barrier()

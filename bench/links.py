"""Links that take time and no processor: the kernel paces the sockets of the ranks to a rate.

Without that, messages between processes of one machine are copies by the cores that compute, and nothing can
be hidden.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch.distributed as dist

LINK = 200_000_000  # bytes per second that a rank sends
_SO_MAX_PACING_RATE = 47  # Linux, `asm-generic/socket.h`; no name in Python


def pace(rate: int | None) -> None:
    """Have the kernel send what this process sends over TCP at a rate; None: as fast as it can."""
    value = struct.pack("I", rate or 0xFFFFFFFF)
    for descriptor in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
        try:
            copy = os.dup(descriptor)
        except OSError:  # gone
            continue
        try:
            held = socket.socket(fileno=copy)
        except OSError:  # no socket
            os.close(copy)
            continue
        with held:
            if held.type == socket.SOCK_STREAM and held.family in (socket.AF_INET, socket.AF_INET6):
                held.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, value)


def medians_at(rate: int | None, steps: Sequence[Callable[[], object]], turns: int) -> list[float]:
    """The median seconds of each step on links of a rate, in turns; the first is left out."""
    pace(rate)
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(turns + 1):
        for place in range(len(steps)):
            index = (turn + place) % len(steps)
            dist.barrier()
            start = time.perf_counter()
            steps[index]()
            times[index].append(time.perf_counter() - start)
    pace(None)
    return [median(each[1:]) for each in times]

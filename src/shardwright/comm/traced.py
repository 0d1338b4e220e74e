"""What cannot be sent between pairs of ranks: tensors of a trace, and all that an erased function sends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.nn import Parameter

from shardwright.errors import PlanError

REAL = (Tensor, Parameter)  # classes of local tensors that hold values; a trace has others
_lock = threading.Lock()
blocks = 0  # how many are open; a known plan asks for nothing else


@contextmanager
def in_groups() -> Iterator[None]:
    """Within the block every redistribution goes through the process groups of its axes, as a graph's does.

    A program that is recorded holds functional collectives. Where one rank records, another replays and a
    third runs the same call as it is, all three must send the same: so all runs of an erased function do.
    One count for the process: a backward sends from the threads of autograd.
    """
    global blocks  # noqa: PLW0603 - see above
    with _lock:
        blocks += 1
    try:
        yield
    finally:
        with _lock:
            blocks -= 1


def goes_in_groups(x: Tensor) -> bool:
    """Must it be sent by collectives of process groups?"""
    return blocks > 0 or type(x) not in REAL


def is_traced(x: Tensor) -> bool:
    """True for the fake and functional tensors of a trace."""
    return type(x) not in REAL


def refuse_between(what: object, local: Tensor) -> None:
    """Raises: PlanError: `what`, a move between two meshes with this local tensor, is traced."""
    if is_traced(local):
        raise PlanError(
            f"{what}: a traced graph cannot hold messages between two meshes; "
            "redistribute before the compiled function"
        )

"""A guard against hangs: before a plan runs, its ranks compare what they are about to do.

Ranks that run different plans wait for messages that nobody sends. With the guard on, every rank of the mesh
sends the text of its plan to every other first; a difference raises on all of them, with both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardwright.comm.wires import PeerWire
from shardwright.errors import PlanError
from shardwright.plan.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

_BYTES = 1024
_guards = 0


@contextmanager
def guarded_plans() -> Iterator[None]:
    """Compare plans across ranks inside the block. All ranks must enter and leave it together.

    Cost: per plan that runs, each rank sends 1 KiB to every other rank of the mesh.
    """
    global _guards  # noqa: PLW0603 - a switch of the process
    _guards += 1
    try:
        yield
    finally:
        _guards -= 1


def guarding() -> bool:
    """True inside `guarded_plans()`."""
    return _guards > 0


def check_same_plan(plan: Plan) -> None:
    """Compare this plan with those of the other ranks of its mesh, or of its two meshes.

    At every run: comparing only new plans would miss a rank that repeats an old one.

    Raises: PlanError: another rank is about to run another plan.
    """
    ranks = tuple(dict.fromkeys((*plan.source.ranks, *plan.target.ranks)))
    if dist.get_rank() not in ranks:
        return
    wire = PeerWire(tuple((rank,) for rank in ranks), ranks, "all")
    mine = _as_tensor(_text(plan))
    n = len(ranks)
    theirs = wire.exchange(mine.repeat(n), [_BYTES] * n, [_BYTES] * n, "hang guard").view(n, _BYTES)
    _compare(mine, theirs, ranks)


def _compare(mine: Tensor, theirs: Tensor, ranks: tuple[int, ...]) -> None:
    for rank, other in zip(ranks, theirs, strict=True):
        if not torch.equal(mine, other):
            raise PlanError(
                f"rank {dist.get_rank()} and rank {rank} are about to run different redistributions:\n"
                f"  rank {dist.get_rank()}: {_as_text(mine)}\n  rank {rank}: {_as_text(other)}"
            )


def _text(plan: Plan) -> str:
    if plan.source.mesh_shape == plan.target.mesh_shape:
        return f"{plan.source} -> {plan.target}"
    return " -> ".join(f"{layout} on ranks {layout.ranks}" for layout in (plan.source, plan.target))


def _as_tensor(text: str) -> Tensor:
    encoded = text.encode()[:_BYTES].ljust(_BYTES)
    return torch.frombuffer(bytearray(encoded), dtype=torch.uint8)


def _as_text(encoded: Tensor) -> str:
    return bytes(encoded.tolist()).decode(errors="replace").rstrip()

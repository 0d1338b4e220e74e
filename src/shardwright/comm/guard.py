"""A guard against hangs: before a plan runs, its ranks compare what they are about to do.

Ranks that run different plans wait for messages that nobody sends. With the guard on, every rank of the mesh
sends a digest and the text of its plan to every other first; a difference raises on all of them, with both
sides. The plans of a list are compared at once, how many they are included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
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

    Cost: per plan that runs, or list of plans, each rank sends 1 KiB to every other rank of the mesh.
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


def check_same_plans(plans: Sequence[Plan]) -> None:
    """Compare these plans, which run together, with those of the other ranks of their mesh or two meshes.

    At every run: comparing only new plans would miss a rank that repeats an old one. Where lists of one
    length differ, their plans are compared one by one, to name the first that does.

    Raises: PlanError: another rank is about to run other plans.
    """
    if not plans:
        return
    ranks = tuple(dict.fromkeys((*plans[0].source.ranks, *plans[0].target.ranks)))
    if dist.get_rank() not in ranks:
        return
    one_of = f"the first of {len(plans)}: " if len(plans) > 1 else ""
    counted = _gathered(f"{len(plans)} plan {_digest(plans)}: {one_of}{_text(plans[0])}", ranks)
    if len(set(counted)) > 1 and len({text.split(" ", 1)[0] for text in counted}) == 1:
        for plan in plans:
            _compare(_gathered(f"1 plan {_digest([plan])}: {_text(plan)}", ranks), ranks)
    _compare(counted, ranks)


def _gathered(mine: str, ranks: tuple[int, ...]) -> list[str]:
    """The text of each rank."""
    n = len(ranks)
    wire = PeerWire(tuple((rank,) for rank in ranks), ranks, "all")
    return [
        _as_text(text)
        for text in wire.exchange(_as_tensor(mine).repeat(n), [_BYTES] * n, [_BYTES] * n, "hang guard").view(
            n, _BYTES
        )
    ]


def _compare(texts: list[str], ranks: tuple[int, ...]) -> None:
    mine = texts[ranks.index(dist.get_rank())]
    for rank, other in zip(ranks, texts, strict=True):
        if mine != other:
            raise PlanError(
                f"rank {dist.get_rank()} and rank {rank} are about to run different redistributions:\n"
                f"  rank {dist.get_rank()}: {mine.split(' ', 1)[1]}\n  rank {rank}: {other.split(' ', 1)[1]}"
            )


def _digest(plans: Sequence[Plan]) -> str:
    """Of layouts and steps: the same layouts may be reached by other steps, under another network or cap."""
    return sha256("\n".join(str(plan) for plan in plans).encode()).hexdigest()[:16]


def _text(plan: Plan) -> str:
    if plan.source.mesh_shape == plan.target.mesh_shape:
        return f"{plan.source} -> {plan.target}; {plan.reason}"
    layouts = " -> ".join(f"{layout} on ranks {layout.ranks}" for layout in (plan.source, plan.target))
    return f"{layouts}; {plan.reason}"


def _as_tensor(text: str) -> Tensor:
    encoded = text.encode()[:_BYTES].ljust(_BYTES)
    return torch.frombuffer(bytearray(encoded), dtype=torch.uint8)


def _as_text(encoded: Tensor) -> str:
    return bytes(encoded.tolist()).decode(errors="replace").rstrip()

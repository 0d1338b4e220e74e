"""`explicit()`: inside it an op that would communicate on its own raises instead."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, ContextDecorator

from shardwright.compat.dynamo import never_traced
from shardwright.errors import ImplicitRedistributionError
from shardwright.layout.layout import Layout
from shardwright.plan.decide import plan_redistribution
from shardwright.tensor.dtensor import DTensor

_NO_GRAPH = "no graph holds a block of explicit(); fix: open it around the call of what is compiled"


class _Mode(threading.local):
    explicit = False  # is an implicit redistribution refused in this thread?
    before: tuple[bool, ...] = ()  # what was, outside of each block that is open


here = _Mode()


class _Turned(AbstractContextManager[None], ContextDecorator):
    """Of a generator Dynamo would run the two ends while it reads, and leave nothing of them (torch 2.14)."""

    def __init__(self, explicit: bool) -> None:
        self._explicit = explicit

    @never_traced(_NO_GRAPH)
    def __enter__(self) -> None:
        here.before, here.explicit = (*here.before, here.explicit), self._explicit

    @never_traced(_NO_GRAPH)
    def __exit__(self, *error: object) -> None:
        *outer, here.explicit = here.before
        here.before = tuple(outer)


@never_traced(_NO_GRAPH)
def explicit() -> AbstractContextManager[None]:
    """Within the block (of this thread) an implicit redistribution raises ImplicitRedistributionError.

    Of what is compiled, where it is compiled: a graph that was made outside of a block says nothing in it.
    """
    return _Turned(True)


def implicit() -> AbstractContextManager[None]:
    """Within the block nothing is refused, whatever the blocks around it are: nothing there really runs."""
    return _Turned(False)


def refuse_exchange(op: str, sent: int, what: str) -> None:
    """Raise, while `explicit()` is active, for an op whose ranks exchange what they made while it runs."""
    if here.explicit and sent:
        raise ImplicitRedistributionError(
            f"{op}: would {what}, about {sent} B sent by each rank (explicit mode allows no implicit "
            "communication)\n"
            "  fix:  redistribute the operands so that the dim along which the op works is whole"
        )


def refuse_moves(op: str, x: DTensor, target: Layout, why: str) -> None:
    """Raise, while `explicit()` is active, for an op that moves an operand to another layout."""
    if not here.explicit:
        return
    cost = plan_redistribution(x._spec.shown.layout, target).total_bytes
    if cost:
        named = ", ".join(f"{a!r}: {p!r}" for a, p in zip(target.axes, target.placements, strict=True))
        raise ImplicitRedistributionError(
            f"{op}: needs an implicit redistribution (explicit mode allows none): {why}\n"
            f"  operand    {x._spec.shown.layout}   <- must become {target}\n"
            f"  fix:  operand.redistribute({{{named}}})     {cost} B over all ranks"
        )

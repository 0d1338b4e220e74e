"""`explicit()`: inside it an op that would communicate on its own raises instead."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardwright.errors import ImplicitRedistributionError
from shardwright.plan.decide import plan_redistribution

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from shardwright.layout.layout import Layout
    from shardwright.tensor.dtensor import DTensor


class _Mode(threading.local):
    explicit = False


_mode = _Mode()


@contextmanager
def explicit() -> Iterator[None]:
    """Within the block (of this thread) an implicit redistribution raises ImplicitRedistributionError."""
    before = _mode.explicit
    _mode.explicit = True
    try:
        yield
    finally:
        _mode.explicit = before


@contextmanager
def implicit() -> Iterator[None]:
    """Within the block nothing is refused, whatever the blocks around it are: nothing there really runs."""
    before = _mode.explicit
    _mode.explicit = False
    try:
        yield
    finally:
        _mode.explicit = before


def is_explicit() -> bool:
    """Is an implicit redistribution refused here?"""
    return _mode.explicit


def refuse_to_finish(x: DTensor, target: Layout, why: str) -> None:
    """Raise, while `explicit()` is active, for a step that reduces a pending value."""
    if not _mode.explicit:
        return
    cost = plan_redistribution(x._spec.layout, target).total_bytes
    if cost:
        raise ImplicitRedistributionError(
            f"{why}: needs an implicit redistribution (explicit mode allows none): it finishes terms\n"
            f"  {x._spec.layout} -> {target}     {cost} B over all ranks\n"
            "  fix:  redistribute the operand of the op so that the dim it works along is whole"
        )


def refuse_exchange(op: torch._ops.OpOverload, sent: int, tensors: list[DTensor], what: str) -> None:
    """Raise, while `explicit()` is active, for an op that would communicate while it runs."""
    if not _mode.explicit or not sent:
        return
    lines = [f"{op.name()}: would {what} (explicit mode allows no implicit communication)"]
    lines += [f"  operand {index}  {x._spec.layout}" for index, x in enumerate(tensors)]
    lines.append(f"  about {sent} B sent by each rank")
    lines.append("  fix:  redistribute the operands so that the dim along which the op works is whole")
    raise ImplicitRedistributionError("\n".join(lines))


def refuse_moves(op: str, x: DTensor, target: Layout, why: str) -> None:
    """Raise, while `explicit()` is active, for an op that moves an operand to another layout."""
    if not _mode.explicit:
        return
    cost = plan_redistribution(x._spec.layout, target).total_bytes
    if cost:
        named = ", ".join(f"{a!r}: {p!r}" for a, p in zip(target.axes, target.placements, strict=True))
        raise ImplicitRedistributionError(
            f"{op}: needs an implicit redistribution (explicit mode allows none): {why}\n"
            f"  operand    {x._spec.layout}   <- must become {target}\n"
            f"  fix:  operand.redistribute({{{named}}})     {cost} B over all ranks"
        )

"""What else a call could do, and what it would cost: for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.layout.layout import Layout
from shardwright.rules.call import Call
from shardwright.rules.propagate import best_way
from shardwright.rules.search import Choice

_PER_AXIS = 3


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a call.

    Args:
        text: what happens on which axis.
        bytes: bytes that each rank sends for the operands, about.
        total: those, and what is sent later because of the way: the ways are compared by it.
        work: the share of the computation that each rank does.
        rewritten: operands written in place that would be moved and brought back.
    """

    text: str
    bytes: int
    total: int
    work: float
    rewritten: int = 0

    def __str__(self) -> str:
        share = "all of the work" if self.work == 1 else f"1/{round(1 / self.work)} of the work"
        back = ", a written operand is brought back" if self.rewritten else ""
        later = f" ({self.total} B with what follows)" if self.total != self.bytes else ""
        return f"{self.text}: {self.bytes} B sent by each rank{later}, {share}{back}"


def alternatives(call: Call, layouts: Sequence[Layout]) -> tuple[Way, tuple[Way, ...]] | None:
    """The chosen way, and per axis the cheapest others, all else as chosen; None where no rule fits.

    An axis on which every operand is whole is left as it is, so nothing else is listed for it.
    """
    best = best_way(call, tuple(layouts), [])
    if best is None:
        return None
    search, choice = best
    axes = layouts[0].axes
    others = [
        _way(f"{name}: {entry.candidates[axis].text}", entry)
        for axis, name in enumerate(axes)
        if not all(layout.placements[axis].is_replicated for layout in layouts)
        for entry in search.instead(choice, axis)[:_PER_AXIS]
    ]
    texts = zip(axes, choice.candidates, strict=True)
    return _way("; ".join(f"{axis}: {c.text}" for axis, c in texts), choice), tuple(others)


def _way(text: str, choice: Choice) -> Way:
    price = choice.price
    return Way(text, price.bytes, price.total, price.work, price.rewritten)

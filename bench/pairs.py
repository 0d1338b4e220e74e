"""Pairs of layouts that both libraries know: R, S0, S1 and P on every axis, and how they are written."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

import typer

_KINDS = {"R": ("Replicate", ()), "S0": ("Shard", (0,)), "S1": ("Shard", (1,)), "P": ("Partial", ())}
# One of each kind of plan: local, gather, all-reduce, exchange, terms, two rounds.
QUICK = {
    (4,): ("R -> S1", "S0 -> R", "P -> R", "S0 -> S1", "S1 -> S0", "P -> S0"),
    (2, 2): ("R R -> S0 S1", "S0 S1 -> R R", "P P -> R R", "S0 S1 -> S1 S0", "P S0 -> S0 S0", "P S0 -> S0 R"),
}


@dataclass(frozen=True)
class Pair:
    """From one placement per axis to another, on a mesh of these sizes."""

    sizes: tuple[int, ...]
    source: tuple[str, ...]
    target: tuple[str, ...]

    def __str__(self) -> str:
        return f"{' '.join(self.source)} -> {' '.join(self.target)}"

    @property
    def ranks(self) -> int:
        """Ranks of the mesh."""
        return prod(self.sizes)


def pairs_of(sizes: tuple[int, ...]) -> list[Pair]:
    """Every ordered pair that torch can do: a pending target only where the source is pending."""
    layouts = list(product(_KINDS, repeat=len(sizes)))
    return [
        Pair(sizes, source, target)
        for source, target in product(layouts, repeat=2)
        if source != target and all(b != "P" or a == "P" for a, b in zip(source, target, strict=True))
    ]


def parse(text: str, sizes: tuple[int, ...]) -> Pair:
    """The pair that `S0 R -> R S0` names.

    Raises: BadParameter: not two lists of R, S0, S1, P with one entry per axis.
    """
    halves = [tuple(half.split()) for half in text.split("->")]
    if len(halves) != 2 or any(len(half) != len(sizes) or set(half) - set(_KINDS) for half in halves):
        raise typer.BadParameter(
            f"{text!r} is no pair on a mesh {sizes}: write e.g. 'S0{' R' * (len(sizes) - 1)} -> "
            f"R{' S0' * (len(sizes) - 1)}', of {', '.join(_KINDS)}"
        )
    return Pair(sizes, *halves)


def placements(library: object, names: tuple[str, ...]) -> list[object]:
    """The placements of these names in a library."""
    return [getattr(library, _KINDS[name][0])(*_KINDS[name][1]) for name in names]

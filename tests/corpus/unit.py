"""What is run together, in a process of its own: the cases of one op on one mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tests.corpus.row import Row

Sizes = tuple[int, ...]
WITHOUT: tuple[Sizes, ...] = ((),)  # the meshes of what needs none


class Case(NamedTuple):
    """What is tried, in words, and a call that tells in one line what came of it; maybe of another family."""

    text: str
    tell: Callable[[], str]
    family: str = ""


@dataclass(frozen=True)
class Unit:
    """Cases that are tried one after the other, beginning with nothing known, on one mesh after another.

    meshes: their sizes, () for none. cases: those on a mesh. others: families that some cases are of.
    """

    family: str
    op: str
    meshes: tuple[Sizes, ...]
    cases: Callable[[Sizes], Iterable[Case]]
    others: tuple[str, ...] = ()

    @property
    def families(self) -> tuple[str, ...]:
        """All that its rows are of."""
        return self.family, *self.others

    def row(self, mesh: Sizes, case: Case) -> Row:
        """What came of one case."""
        words = f"{'x'.join(map(str, mesh))} " if mesh else ""
        return Row(case.family or self.family, self.op, words + case.text, case.tell())

    def __str__(self) -> str:
        return f"{self.family} {self.op}"

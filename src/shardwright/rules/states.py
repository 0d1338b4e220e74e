"""How long the labels are on the coords after some cuts: worked out only when somebody asks.

Most rules never ask: a dim that is one label is cut in the same way whatever its size. Then nothing that was
decided depends on sizes, and `asked` says so.
"""

from __future__ import annotations

from shardwright.placement.base import Partition
from shardwright.rules.along_label import part_lengths
from shardwright.rules.equation import Sizes

_Cuts = tuple[tuple[int, Partition, int], ...]


class States:
    """Every assignment of sizes to labels that the cuts so far leave on some coord.

    Args:
        sizes: the logical sizes.
        cuts: the label, the partition and the size of the axis, one after another.
        questions: where each question is noted; shared by all states of one search.
    """

    __slots__ = ("_cuts", "_found", "_questions", "_sizes")

    def __init__(self, sizes: Sizes, cuts: _Cuts = (), questions: list[None] | None = None) -> None:
        self._sizes = sizes
        self._cuts = cuts
        self._questions = [] if questions is None else questions
        self._found: frozenset[Sizes] | None = None

    def cut(self, label: int, part: Partition, n: int) -> States:
        """What is left after one more cut."""
        return States(self._sizes, (*self._cuts, (label, part, n)), self._questions)

    @property
    def asked(self) -> int:
        """How often a state of this search was asked for sizes."""
        return len(self._questions)

    def every(self) -> frozenset[Sizes]:
        """All of them."""
        self._questions.append(None)
        if self._found is None:
            self._found = frozenset({self._sizes})
            for label, part, n in self._cuts:
                self._found = frozenset(_after(self._found, label, part, n))
        return self._found


def _after(states: frozenset[Sizes], label: int, part: Partition, n: int) -> set[Sizes]:
    found: set[Sizes] = set()
    for sizes in states:
        lengths = set(part_lengths(part, sizes[label], n))
        found |= {(*sizes[:label], length, *sizes[label + 1 :]) for length in lengths}
    return found

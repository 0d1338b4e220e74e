"""One row: a case of an op, and all that a user sees of it; many rows as hashes, one per op."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

_DIGITS = 12


class Row(NamedTuple):
    """family and op (or kind of move), what was tried, and what the library made of it, as text."""

    family: str
    op: str
    case: str
    told: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What was tried."""
        return self[:3]

    def __str__(self) -> str:
        return "\t".join(self)

    @classmethod
    def from_line(cls, line: str) -> Row:
        """The reverse of `str`."""
        return cls(*line.rstrip("\n").split("\t"))


class Digest(NamedTuple):
    """How many rows an op has, and a hash of them in order."""

    rows: int
    hash: str


Digests = dict[tuple[str, str], Digest]


def digests(rows: Iterable[Row]) -> Digests:
    """By (family, op); the order in which the rows were made does not matter."""
    lines: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        lines[row.family, row.op].append(str(row))
    return {key: Digest(len(found), _hash(sorted(found))) for key, found in sorted(lines.items())}


def _hash(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:_DIGITS]

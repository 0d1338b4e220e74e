"""All units: what the corpus consists of, and the sample of it that every run of the tests checks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain

import xxhash

from tests.corpus.families import (
    calls,
    chains,
    errors,
    lists,
    moves,
    operators,
    plans,
    programs,
    rules,
    views,
)
from tests.corpus.unit import Unit

_FAMILIES = (operators, lists, views, chains, plans, moves, rules, calls, programs, errors)

# Of each family one op of so many is in the sample, chosen by a hash of its name.
_ONE_OF = {"operators": 200, "rules": 300, "programs": 130, "plans": 36, "makers": 18, "errors": 1}
_ONE_OF_OTHERS = 70


def every_unit() -> Iterator[Unit]:
    """All of them, family by family."""
    return chain.from_iterable(family.units() for family in _FAMILIES)


def chosen(families: set[str], ops: Collection[str], *, sample: bool) -> list[Unit]:
    """Those of some families (none given: all), of some ops, of the sample."""
    return [
        unit
        for unit in every_unit()
        if (not families or not families.isdisjoint(unit.families))
        and (not ops or unit.op in ops)
        and (not sample or in_sample(unit))
    ]


def in_sample(unit: Unit) -> bool:
    """Every run of the tests checks it."""
    one_of = _ONE_OF.get(unit.family, _ONE_OF_OTHERS)
    return xxhash.xxh3_64_intdigest(f"{unit.family} {unit.op}".encode()) % one_of == 0

"""How a reshape renames elements: the common factors of two shapes, as labels on both sides."""

from __future__ import annotations

from itertools import pairwise
from math import gcd, prod

from shardwright.index.view import leading, neighbours


def reshape_formula(source: tuple[int, ...], target: tuple[int, ...]) -> str:
    """`"b s h e"`-like labels for a reshape: `(2, 6) -> (2, 2, 3)` gives `a0 (a1 a2) -> a0 a1 a2`.

    Dims are matched in runs of equal length. Inside a run, labels are the common refinement of both sides;
    where there is none, the outer common factor alone keeps a label and the rest is whole.
    """
    if 0 in source:
        return _empty_formula(source, target)
    left: list[str] = []
    right: list[str] = []
    count = 0
    for own, other in neighbours(source, target):
        one, two, count = _matched(own, other, count)
        left += one
        right += two
    return f"{' '.join(left) or '()'} -> {' '.join(right) or '()'}"


def _empty_formula(source: tuple[int, ...], target: tuple[int, ...]) -> str:
    """Tensors without elements: leading dims that agree keep their labels."""
    same = leading(source, target)
    common = [f"a{i}" for i in range(same)]
    left = [*common, *["_"] * (len(source) - same)]
    right = [*common, *["_"] * (len(target) - same)]
    return f"{' '.join(left) or '()'} -> {' '.join(right) or '()'}"


def _matched(own: tuple[int, ...], other: tuple[int, ...], count: int) -> tuple[list[str], list[str], int]:
    """The items of both sides of one run, and the number of labels used so far."""
    if len(own) == len(other) == 1:
        return [f"a{count}"], [f"a{count}"], count + 1
    factors = _refinement(own, other)
    if factors is None:
        return _outer_only(own, other, count)
    names = [f"a{count + i}" for i in range(len(factors))]
    one = _grouped(own, factors, names)
    two = _grouped(other, factors, names)
    return one, two, count + len(factors)


def _refinement(own: tuple[int, ...], other: tuple[int, ...]) -> list[int] | None:
    """Factors, outer to inner, of which both sides are products of neighbours; None if there are none."""
    ends = sorted(_suffix_products(own) | _suffix_products(other), reverse=True)
    factors: list[int] = []
    for outer, inner in pairwise(ends):
        if outer % inner:
            return None
        factors.append(outer // inner)
    return factors


def _suffix_products(sizes: tuple[int, ...]) -> set[int]:
    return {prod(sizes[i:]) for i in range(len(sizes) + 1)}


def _grouped(sizes: tuple[int, ...], factors: list[int], names: list[str]) -> list[str]:
    """One item per dim: the names of its factors; a dim of size 1 is a number."""
    items: list[str] = []
    at = 0
    for size in sizes:
        taken: list[str] = []
        length = 1
        while length < size:
            length *= factors[at]
            taken.append(names[at])
            at += 1
        items.append("1" if not taken else taken[0] if len(taken) == 1 else f"({' '.join(taken)})")
    return items


def _outer_only(own: tuple[int, ...], other: tuple[int, ...], count: int) -> tuple[list[str], list[str], int]:
    """Both sides by their common outer factor; what is inside it must be whole."""
    common = gcd(own[0], other[0])
    name = f"a{count}"

    def items(sizes: tuple[int, ...]) -> list[str]:
        first = name if sizes[0] == common else f"({name} {sizes[0] // common})"
        return [first, *["_"] * (len(sizes) - 1)]

    return items(own), items(other), count + 1

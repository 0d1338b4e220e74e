"""Two shapes with the same elements in order: which runs of dims belong together."""

from __future__ import annotations

from math import prod


def neighbours(
    source: tuple[int, ...], target: tuple[int, ...]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The shortest runs of dims with the same number of elements on both sides, in order.

    Without elements no product tells where a run ends: leading dims that agree, and the rest as one.
    """
    runs: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    i = j = 0
    if 0 in source:
        same = leading(source, target)
        runs = [((size,), (size,)) for size in source[:same]]
        rest = source[same:], target[same:]
        return [*runs, rest] if any(rest) else runs
    while i < len(source) or j < len(target):
        start_i, start_j = i, j
        i, j = min(i + 1, len(source)), min(j + 1, len(target))
        one, two = prod(source[start_i:i]), prod(target[start_j:j])
        while one != two:
            if (one < two and i < len(source)) or j == len(target):
                one, i = one * source[i], i + 1
            else:
                two, j = two * target[j], j + 1
        runs.append((source[start_i:i], target[start_j:j]))
    return runs


def leading(source: tuple[int, ...], target: tuple[int, ...]) -> int:
    """How many leading dims agree."""
    same = 0
    while same < min(len(source), len(target)) and source[same] == target[same]:
        same += 1
    return same

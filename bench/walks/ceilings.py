"""The stored ceilings: the most that each number may be, so that none creeps up unseen."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

PATH = Path(__file__).with_name("ceilings.toml")
Numbers = Mapping[str, Mapping[str, int]]  # walk -> what is counted -> number
_HEADER = (
    "# The most that each number of `python -m bench.walks` may be; its `--check` fails above.\n"
    "# `--lower` brings them down to what is counted. To raise one, edit it and say why in the commit.\n"
)
# A size of the source is a sign, not a goal: its ceiling leaves room for the next few files.
_ROOM = {("source", "files"): 10, ("source", "lines"): 500}
_WELL_BELOW = 0.95


def read(path: Path = PATH) -> Numbers:
    """The ceilings as they are stored; none where there is no file."""
    return tomllib.loads(path.read_text()) if path.exists() else {}


def above(found: Numbers, ceilings: Numbers) -> Iterator[str]:
    """One line per number that is above its ceiling, or has none."""
    for walk, what, number, ceiling in _each(found, ceilings):
        if ceiling is None:
            yield f"{walk}: {number:,} {what}, and no ceiling is stored"
        elif number > ceiling:
            yield f"{walk}: {number:,} {what}, {number - ceiling:,} above the ceiling of {ceiling:,}"


def well_below(found: Numbers, ceilings: Numbers) -> Iterator[str]:
    """One line per number whose ceiling can come down."""
    for walk, what, number, ceiling in _each(found, ceilings):
        if ceiling is not None and _rounded(walk, what, number) < _WELL_BELOW * ceiling:
            yield f"{walk}: {number:,} {what}, {ceiling - number:,} below the ceiling of {ceiling:,}"


def lowered(found: Numbers, ceilings: Numbers) -> Numbers:
    """The ceilings, at what was found where that is lower; none goes up or away, and what is new gets one."""
    new = {walk: dict(numbers) for walk, numbers in ceilings.items()}
    for walk, what, number, ceiling in _each(found, ceilings):
        rounded = _rounded(walk, what, number)
        new.setdefault(walk, {})[what] = rounded if ceiling is None else min(rounded, ceiling)
    return new


def write(ceilings: Numbers, path: Path = PATH) -> None:
    """Store them."""
    tables = (
        f"\n[{walk}]\n" + "".join(f'"{what}" = {number}\n' for what, number in numbers.items())
        for walk, numbers in ceilings.items()
    )
    path.write_text(_HEADER + "".join(tables))


def _each(found: Numbers, ceilings: Numbers) -> Iterator[tuple[str, str, int, int | None]]:
    for walk, numbers in found.items():
        for what, number in numbers.items():
            yield walk, what, number, ceilings.get(walk, {}).get(what)


def _rounded(walk: str, what: str, number: int) -> int:
    step = _ROOM.get((walk, what), 1)
    return -(-number // step) * step

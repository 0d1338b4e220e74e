"""The calls that a function makes into the files below one folder."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType


@dataclass(frozen=True)
class Entry:
    """One frame that was entered: its file, below the folder, and its function."""

    file: str
    function: str

    @property
    def package(self) -> str:
        """The sub-package: the first folder, or the file where it is in none."""
        return self.file.partition("/")[0]


@dataclass(frozen=True)
class Count:
    """What a walk entered, in order."""

    entries: Sequence[Entry]

    @property
    def numbers(self) -> dict[str, int]:
        """The three numbers of a walk."""
        packages = [entry.package for entry in self.entries]
        return {
            "calls": len(self.entries),
            "files": len({entry.file for entry in self.entries}),
            "changes": sum(before != after for before, after in pairwise(packages)),
        }

    def by_file(self) -> list[tuple[str, Counter[str]]]:
        """Each file with the calls of its functions, most calls first."""
        found: dict[str, Counter[str]] = {}
        for entry in self.entries:
            found.setdefault(entry.file, Counter())[entry.function] += 1
        return sorted(found.items(), key=lambda item: (-item[1].total(), item[0]))


def count(function: Callable[[], object], folder: Path) -> Count:
    """Call the function once, and count.

    Only this thread is seen. No garbage is collected meanwhile: a finalizer is no part of the call.
    """
    codes: list[CodeType] = []

    def entered(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            codes.append(frame.f_code)

    gc.disable()
    sys.setprofile(entered)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    root = f"{folder}/"
    return Count(
        [
            Entry(code.co_filename.removeprefix(root), code.co_qualname)
            for code in codes
            if code.co_filename.startswith(root)
        ]
    )

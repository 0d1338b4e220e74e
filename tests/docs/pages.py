"""The executable part of the documents: `python` blocks, and the output that stands below some of them.

`<!-- ranks: 4 -->` sends the blocks after it to 4 ranks (0, the default: this process, without a process
group). Blocks of one page with the same number of ranks share their names. `<!-- output -->` before a fenced
block says that it is what the `python` block above it prints (on rank 0). `<!-- run -->` before a `console`
block says that its commands print what stands below each of them.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import linecache
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(\w*)\s*$")
_CONSOLE = re.compile(r"^<!-- run -->\n```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
_RANKS = re.compile(r"^<!-- ranks: (\d+) -->$")


@dataclass(frozen=True)
class Block:
    """One `python` block: where it stands, what it says, where it runs, what it prints (None: not stated)."""

    file: str
    line: int
    code: str
    ranks: int
    output: str | None = None


def pages() -> list[Path]:
    """Every document a reader may copy code from."""
    manual = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *manual]


def sessions(page: Path) -> list[list[Block]]:
    """Return the runs of blocks of a page that share one namespace."""
    return [list(group) for _, group in itertools.groupby(_blocks(page), key=lambda block: block.ranks)]


def commands(page: Path) -> list[tuple[str, str]]:
    """Return the commands of a page that state their output, each with that output."""
    found: list[tuple[str, str]] = []
    for block in _CONSOLE.findall(page.read_text()):
        for entry in block.split("$ ")[1:]:
            command, _, output = entry.partition("\n")
            found.append((command, output))
    return found


def _blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    ranks, output_follows = 0, False
    lines = iter(enumerate(page.read_text().splitlines(), start=1))
    for number, line in lines:
        if marker := _RANKS.match(line):
            ranks = int(marker.group(1))
        elif line.strip() == "<!-- output -->":
            output_follows = True
        elif fence := _FENCE.match(line):
            text = "".join(_until_fence(lines))
            if output_follows:
                found[-1] = replace(found[-1], output=text)
            elif fence.group(1) == "python":
                found.append(Block(str(page), number, text, ranks))
            output_follows = False
    return found


def _until_fence(lines: Iterator[tuple[int, str]]) -> Iterator[str]:
    return (line + "\n" for _, line in itertools.takewhile(lambda item: not item[1].startswith("```"), lines))


def run_session(blocks: list[Block]) -> list[str]:
    """Run blocks one after another as one program; return what each printed."""
    module = types.ModuleType("document")
    sys.modules["document"] = module
    try:
        return [_run(block, module) for block in blocks]
    finally:
        del sys.modules["document"]


def _run(block: Block, module: types.ModuleType) -> str:
    code = compile("\n" * block.line + block.code, block.file, "exec")
    linecache.checkcache(block.file)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, module.__dict__)  # noqa: S102 - executing the documents is the point
    return printed.getvalue()

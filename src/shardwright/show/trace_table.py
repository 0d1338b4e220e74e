"""The rows of a trace, and their text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table
from rich.text import Text

from shardwright.comm.record import Decision, Event
from shardwright.show.console import render

_WIDTH = 200


@dataclass(frozen=True, slots=True)
class TraceRow:
    """Collectives (or decisions: `axis` is empty) of one kind, asked for by one line of the program."""

    op: str
    axis: str
    reason: str
    source_line: str
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class TraceTable:
    """Rows in order of first appearance. `str()` gives text; rich prints it as a table."""

    rows: tuple[TraceRow, ...]

    @property
    def bytes(self) -> int:
        """Bytes that this rank sent, over all rows."""
        return sum(row.bytes for row in self.rows)

    def __iter__(self) -> Iterator[TraceRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __rich__(self) -> Table:
        table = Table(title=f"{self.bytes:,} bytes sent by this rank", title_justify="left")
        for name in ("op", "axis", "reason", "line"):
            table.add_column(name, overflow="fold")
        for name in ("count", "bytes"):
            table.add_column(name, justify="right")
        for row in self.rows:
            line = _short_path(row.source_line) or "(backward)"
            sent = f"{row.bytes:,}" if row.axis else ""
            cells = (row.op, row.axis, row.reason, line, str(row.count), sent)
            table.add_row(*map(Text, cells))  # brackets in a layout are no markup
        return table

    def __str__(self) -> str:
        return render(self, width=_WIDTH)


def tabulate(collectives: Sequence[Event], decisions: Sequence[Decision]) -> TraceTable:
    """Merge what is alike but for its size: same op, axis, reason and line."""
    rows: dict[tuple[str, ...], TraceRow] = {}
    for event in collectives:
        _count(rows, TraceRow(event.op, event.axis, event.reason, event.source_line, 1, event.bytes_sent))
    for decision in decisions:
        reason = f"{decision.reason}: {decision.details}" if decision.details else decision.reason
        _count(rows, TraceRow(decision.op, "", reason, decision.source_line, 1, 0))
    return TraceTable(tuple(rows.values()))


def _count(rows: dict[tuple[str, ...], TraceRow], row: TraceRow) -> None:
    key = (row.op, row.axis, row.reason, row.source_line)
    known = rows.get(key)
    if known is None:
        rows[key] = row
    else:
        rows[key] = replace(known, count=known.count + 1, bytes=known.bytes + row.bytes)


def _short_path(source_line: str) -> str:
    """Show a path below the working folder relative to it."""
    file, _, line = source_line.rpartition(":")
    try:
        return f"{Path(file).relative_to(Path.cwd())}:{line}"
    except ValueError:
        return source_line

"""What differs, as tables: ops by their hashes, rows before and after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tests.corpus.row import Digest, Row
from tests.corpus.stored import Difference


class Changed(NamedTuple):
    """One case, and what it told before and tells now; None: there was no such case."""

    key: tuple[str, str, str]
    before: str | None
    after: str | None


def changed(before: Sequence[Row], after: Sequence[Row]) -> list[Changed]:
    """The cases that tell something else now. Only families and ops that are in `after` are compared."""
    ran = {row[:2] for row in after}
    old = {row.key: row.told for row in before if row[:2] in ran}
    new = {row.key: row.told for row in after}
    keys = sorted({*old, *new})
    return [Changed(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def show_ops(found: Sequence[Difference], console: Console) -> None:
    """The ops whose rows are not those that were stored."""
    table = Table("family", "op", "rows stored", "rows now", title="not as stored", title_justify="left")
    for one in found:
        table.add_row(*map(Text, (one.family, one.op, _rows(one.before), _rows(one.after))))
    console.print(table)


def _rows(digest: Digest | None) -> str:
    return "none" if digest is None else f"{digest.rows} {digest.hash}"


def show_rows(found: Sequence[Changed], limit: int, console: Console) -> None:
    """Some rows, before and after, and how many differ in each family."""
    for one in found[:limit]:
        console.print("\t".join(one.key), style="bold", markup=False, highlight=False, soft_wrap=True)
        for sign, told in (("-", one.before), ("+", one.after)):
            if told is not None:
                console.print(f"  {sign} {told}", markup=False, highlight=False, soft_wrap=True)
    table = Table("family", "rows that differ", "ops")
    for family, count in sorted(Counter(one.key[0] for one in found).items()):
        ops = sorted({one.key[1] for one in found if one.key[0] == family})
        table.add_row(family, str(count), Text(", ".join(ops[:12]) + (" ..." if len(ops) > 12 else "")))
    console.print(table)

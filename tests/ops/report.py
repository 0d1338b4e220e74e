"""What a run found: counts for the eye, and the failures by operator with the command that repeats them."""

from __future__ import annotations

from collections import Counter, defaultdict

from rich.console import Console
from rich.table import Table

from tests.ops.cases import BAD, LENIENT, OK, Record

_SHOWN = 4


def summary(records: list[Record], seconds: float, operators: int, excluded: int, console: Console) -> None:
    """Print verdicts by mesh and placement, and how many operators are right throughout."""
    verdicts = (OK, *BAD, LENIENT)
    table = Table("mesh", "placement", *verdicts)
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for record in records:
        counts["x".join(map(str, record.mesh)), record.case.kind][record.verdict] += 1
    for (mesh, kind), found in sorted(counts.items()):
        table.add_row(mesh, kind, *(f"{found[verdict]:,}" if found[verdict] else "" for verdict in verdicts))
    console.print(table)
    bad = {record.case.operator for record in records if record.verdict in BAD}
    total = Counter(record.verdict for record in records)
    text = ", ".join(f"{total[verdict]:,} {verdict}" for verdict in verdicts if total[verdict])
    console.print(
        f"{operators - len(bad)} of {operators} operators are right throughout ({excluded} excluded); "
        f"{text}; in {seconds:.0f} s",
        style="bold red" if bad else "bold green",
    )


def failures(records: list[Record]) -> str:
    """The failures as Markdown: by operator, each distinct text once, with a command."""
    by_operator: dict[str, list[Record]] = defaultdict(list)
    total: Counter[str] = Counter()
    for record in records:
        total[record.case.operator] += 1
        if record.verdict in BAD:
            by_operator[record.case.operator].append(record)
    lines = [f"# {len(by_operator)} of {len(total)} operators have failures", ""]
    lines += _by_text(by_operator)
    for name, found in sorted(by_operator.items(), key=lambda item: -len(item[1])):
        lines += ["", f"## {name}: {len(found)} of {total[name]} cases"]
        lines += _groups(name, found)
    return "\n".join(lines) + "\n"


def _by_text(by_operator: dict[str, list[Record]]) -> list[str]:
    """One line per kind of failure with the operators that have it."""
    names: dict[str, set[str]] = defaultdict(set)
    for name, found in by_operator.items():
        for record in found:
            names[f"{record.verdict}, {record.stage}: {record.text[:60]}"].add(name)
    rows = sorted(names.items(), key=lambda item: -len(item[1]))
    return [f"- {len(ops)}x `{text}`: {', '.join(sorted(ops)[:12])}" for text, ops in rows[:60]]


def _groups(name: str, found: list[Record]) -> list[str]:
    groups: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in found:
        groups[record.verdict, record.stage, record.text.split(" at (")[0][:90]].append(record)
    lines = []
    for (verdict, stage, _), group in list(groups.items())[:_SHOWN]:
        first, kinds = group[0], sorted({r.case.kind for r in group})
        mesh = ",".join(map(str, first.mesh))
        choice = f"--mesh {mesh} --placements '{first.case.kind}' --dtypes {first.case.dtype}"
        lines += [
            f"- {verdict}, {stage}, {len(group)}x ({'; '.join(kinds)}): {first.text}",
            f"    first: {first.case}",
            f"    `python -m tests.ops --ops {name} {choice}`",
        ]
    if len(groups) > _SHOWN:
        lines.append(f"- ... and {len(groups) - _SHOWN} more kinds of failure")
    return lines

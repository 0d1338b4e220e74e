"""What a run found: counts by strategies, and every failure with the command that repeats it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from tests.compositions.cases import VARIANTS, name_of
from tests.compositions.sweep import BAD, ERROR, OK, REFUSED, WRONG, Record
from tests.compositions.table import TENSOR, TENSORS, Composition

_VERDICTS = (OK, WRONG, ERROR, REFUSED)


def sets_of(compositions: Iterable[Composition]) -> set[frozenset[str]]:
    """The sets of strategies that occur, whatever the way of tensor parallelism."""
    return {frozenset(TENSOR if s in TENSORS else s for s in name_of(c).split("+")) for c in compositions}


def summary(records: list[Record], seconds: float, console: Console) -> None:
    """A table by strategies, and the last line: how many cases are ok, wrong, errors, refused."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        counts[name_of(record.case.composition)][record.verdict] += 1
    table = Table("strategies", *_VERDICTS)
    for name, found in sorted(counts.items(), key=lambda item: (item[0].count("+"), item[0])):
        table.add_row(name, *(str(found[verdict] or "") for verdict in _VERDICTS))
    console.print(table)
    total = Counter(record.verdict for record in records)
    text = ", ".join(f"{total[verdict]} {verdict}" for verdict in _VERDICTS)
    bad = sum(total[verdict] for verdict in BAD)
    style = "bold red" if bad else "bold green"
    console.print(f"{len(records)} cases: {text}; in {seconds:.0f} s", style=style)


def failure(record: Record) -> str:
    """One failure with its command."""
    case = record.case
    variant = next((name for name, variant in VARIANTS.items() if variant == case.variant), "")
    command = (
        f"python -m tests.compositions --models '{case.model}' --strategies {name_of(case.composition)} "
        f"--variants '{variant}'"
    )
    return f"{record.verdict}: {case}\n  {shortened(record.text)}\n  {command}"


def shortened(text: str) -> str:
    """An error of a rank without its frames but the last, and without its peers; of one that died, all."""
    lines = text.splitlines()
    frames = [index for index, line in enumerate(lines) if line.startswith("  File ")]
    if not frames or lines[0].startswith("hang") or " was killed by " in lines[0]:
        return text
    kept = [line for line in lines[frames[-1] :] if not line.startswith("rank ")]
    return "\n  ".join([lines[0], *kept])

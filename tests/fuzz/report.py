"""What a run found: counts, and each class of failures with its smallest program to paste."""

from __future__ import annotations

from collections import Counter, defaultdict

from tests.fuzz.paste import source
from tests.fuzz.program import Program
from tests.fuzz.shrink import shrink
from tests.fuzz.sweep import Checked, Worlds
from tests.fuzz.verdicts import BAD, OK, UNDUE, Verdict

MOST_UNDUE = 1 / 1000


def report(found: Checked, seconds: float, worlds: Worlds, *, minimise: int) -> tuple[str, bool]:
    """The report, and whether the run is good: nothing wrong, undue errors below one in a thousand."""
    counts = Counter(verdict.kind for _, verdict in found)
    classes: dict[str, list[tuple[Program, Verdict]]] = defaultdict(list)
    for program, verdict in found:
        if verdict.kind != OK:
            classes[verdict.sort].append((program, verdict))
    ordered = sorted(classes.items(), key=lambda item: (BAD.index(item[1][0][1].kind), -len(item[1])))
    lines = []
    for number, (sort, members) in enumerate(ordered):
        lines.append(f"\n## {len(members)}x {sort}")
        lines.append(f"   seeds {', '.join(str(p.seed) for p, _ in members[:6])}")
        program, verdict = min(members, key=lambda m: len(m[0].steps))
        lines.append(f"   {verdict.step}\n   {verdict.text}")
        if number < minimise:
            small, verdict = shrink(program, verdict, worlds)
            lines += ["", source(small, verdict)]
    lines += ["", f"classes of failures: {len(ordered)}", *(f"{len(m):5}x {sort}" for sort, m in ordered)]
    unstable = sum(verdict.unstable for _, verdict in found)
    replayed = sum(verdict.replayed for _, verdict in found)
    told = ", ".join(f"{counts[kind]:,} {kind}" for kind in (OK, *BAD))
    lines.append(
        f"\n{len(found):,} programs, {sum(len(p.steps) for p, _ in found):,} steps in {seconds:.0f} s "
        f"({len(found) / max(seconds, 1e-9):.1f} a second): {told}; "
        f"{unstable:,} values that rounding alone decides were not compared"
        + (f"; {replayed:,} were replays" if replayed else "")
    )
    good = not any(counts[kind] for kind in BAD if kind != UNDUE) and counts[UNDUE] <= MOST_UNDUE * len(found)
    return "\n".join(lines), good

"""`python -m tests.compositions.page`: the manual's tables of what composes, made of the cases."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

from tests.compositions.cases import Case, cases
from tests.compositions.report import sets_of
from tests.compositions.table import EXPERT, FSDP, HSDP, REPLICATE, TENSOR

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "parallelism.md"
_BEGIN, _END = "<!-- compositions: generated -->\n", "<!-- compositions: end -->\n"
_NAMES = (TENSOR, EXPERT, REPLICATE, FSDP, HSDP)  # in the order in which they are applied


def tables() -> str:
    """What composes with what, and what is refused for which reason."""
    found = list(cases())
    right = sets_of(case.composition for case in found if not case.refusal)
    lines = ["| | " + " | ".join(f"`{name}`" for name in _NAMES) + " |", "|" + "---|" * (len(_NAMES) + 1)]
    for row in _NAMES:
        marks = ["alone" if name == row else _mark({row, name}, right) for name in _NAMES]
        lines.append(f"| `{row}` | " + " | ".join(marks) + " |")
    threes = [" + ".join(s) for s in combinations(_NAMES, 3) if frozenset(s) in right]
    lines += ["", f"All three together: {', '.join(threes)}.", ""]
    lines += ["| refused | why | instead |", "|---|---|---|"]
    return "\n".join([*lines, *_refusals(found)]) + "\n"


def _mark(names: set[str], right: set[frozenset[str]]) -> str:
    return "yes" if frozenset(names) in right else "with a third"


def _refusals(found: list[Case]) -> list[str]:
    """One line per reason, with the first example of it."""
    examples: dict[str, Case] = {}
    for case in found:
        if case.refusal:
            examples.setdefault(case.refusal.why, case)
    return [
        f"| {case.refusal.what} | {why} | {case.refusal.instead} |"
        for why, case in examples.items()
        if case.refusal
    ]


def written(text: str) -> str:
    """The page with its tables made anew."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return before + _BEGIN + tables() + _END + after


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))

"""What came of a program, as data that crosses processes."""

from __future__ import annotations

import re
from dataclasses import dataclass

OK, WRONG, UNDUE, SILENT, CRASH = "ok", "wrong", "undue error", "no error", "crash"
BAD = (CRASH, WRONG, SILENT, UNDUE)  # the worst first


_SILENT = "with torch.no_grad(): "


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a program.

    Args:
        kind: ok; wrong; undue error: one device has none; no error: one device has one; crash, or hang.
        text: what is wrong, in one line.
        step: the source of the step where it showed, if that is known.
        unstable: variables that rounding alone decides, which were not compared.
        replayed: what was compared is what a replay gave.
    """

    kind: str
    text: str = ""
    step: str = ""
    unstable: int = 0
    replayed: bool = False

    @property
    def sort(self) -> str:
        """The class of a failure: its text without names, numbers and layouts."""
        plain = re.sub(r"\(.*?\)|\[.*?\]|\{.*?\}|'[^']*'|\"[^\"]*\"", "", self.text)
        plain = re.sub(r"-?\d[\d.e+-]*j?|\b[vx]\d+\b", "#", plain)
        call = re.search(r"(?:= |: |^)((?:\w+\.)*\.?\w+_?)\(|\.(\w+)\(", self.step.removeprefix(_SILENT))
        name = next((g for g in call.groups() if g), "") if call else ""
        return f"{self.kind}: {name.rpartition('.')[2]}: {' '.join(plain.split())[:110]}"


def worst(verdicts: list[Verdict]) -> Verdict:
    """Of all ranks."""
    for kind in BAD:
        found = [verdict for verdict in verdicts if verdict.kind == kind]
        if found:  # the rank that raised knows more than its peers
            return next((v for v in found if "another rank" not in v.text), found[0])
    return verdicts[0]

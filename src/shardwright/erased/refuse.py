"""What cannot be recorded, by its name and by the line of the program."""

from __future__ import annotations

from dataclasses import dataclass

NOT_REPEATED = "the call changes it; a replay would not"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a call runs unerased. what: the operation or the state; where: `file:line` of the program."""

    what: str
    why: str
    where: str = ""

    def __str__(self) -> str:
        at = f"{self.where}: " if self.where else ""
        return f"{at}{self.what}: {self.why}"

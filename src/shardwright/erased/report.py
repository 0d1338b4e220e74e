"""What `fast.report()` says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardwright.erased.entry import Entry
    from shardwright.erased.refuse import Refusal


@dataclass(slots=True)
class Report:
    """recordings, replays, and as_it_is: why calls ran unerased, and how many did, by reason and line."""

    name: str
    recordings: int = 0
    replays: int = 0
    as_it_is: dict[str, int] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)
    last_change: str = ""
    warned: bool = False

    def ran_as_it_is(self, why: str, where: str) -> None:
        """Count a call that was not replayed."""
        line = f"{where}: {why}" if where else why
        self.as_it_is[line] = self.as_it_is.get(line, 0) + 1

    def refused(self, refusals: Iterable[Refusal]) -> str:
        """Count what a recording could not hold; one of it, which an attempt before met too, if any did."""
        lines, before = [*map(str, refusals)], set(self.refusals)
        for line in lines:
            self.refusals[line] = self.refusals.get(line, 0) + 1
        return next((line for line in lines if line in before), lines[0])

    def first_refusal(self) -> str:
        """One of them, for a message."""
        return next(iter(self.refusals), "its results want gradients, and no backward came")

    def __str__(self) -> str:
        lines = [f"erase({self.name}): {self.recordings} recordings, {self.replays} replays"]
        if self.refusals:
            lines += ["not recorded:", *(f"  {line}  ({n}x)" for line, n in self.refusals.items())]
        if self.as_it_is:
            lines += ["ran as it is:", *(f"  {line}  ({n}x)" for line, n in self.as_it_is.items())]
        return "\n".join(lines)

    def text(self, entries: list[Entry]) -> str:
        """The report, and every local program."""
        return "\n\n".join([str(self), *map(str, entries)])

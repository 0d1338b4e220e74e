"""Which process writes a save, so that whoever finds its journal can tell whether it has ended.

Where nothing can be locked, that is the only proof: a process is named by its machine's boot, its pid
namespace, its pid and when it began, and never is there another one of that name.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwright.remember import remembered

# Of this process: the saves that are under way. No table to forget: only this set knows of them.
saves_here: set[str] = set()


@dataclass(frozen=True)
class Owner:
    """A process. `boot` and `space` are empty where the system does not tell them."""

    host: str
    boot: str
    space: str
    pid: int
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @classmethod
    def parse(cls, told: object) -> Owner | None:
        """What a journal says. None: it is no owner."""
        if not isinstance(told, Mapping) or set(told) != set(cls.__dataclass_fields__):
            return None
        fits = all(type(one) is (int if name == "pid" else str) for name, one in told.items())
        return cls(**told) if fits else None

    @property
    def _is_near(self) -> bool:
        here = this_process()
        return bool(here.boot and here.space) and (self.boot, self.space) == (here.boot, here.space)

    def ended(self, save: str) -> bool:
        """Whether it is certain that this process writes this save no more."""
        if not self._is_near:
            return False
        return save not in saves_here if self == this_process() else _since(self.pid) != self.since

    def lives(self, save: str) -> bool:
        """Whether it is certain that this process is there, and may write the save."""
        return self._is_near and not self.ended(save)


def this_process() -> Owner:
    """The process that asks."""
    return _process(os.getpid())


@remembered(4)
def _process(pid: int) -> Owner:
    return Owner(socket.gethostname(), _text("/proc/sys/kernel/random/boot_id"), _space(), pid, _since(pid))


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _space() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _since(pid: int) -> str:
    """When a process began, in ticks of this boot; empty: there is no such process, or it is a zombie."""
    state, *rest = _text(f"/proc/{pid}/stat").rpartition(")")[2].split() or [""]
    return rest[18] if len(rest) > 18 and state not in ("Z", "X") else ""

"""What launcher and ranks tell each other without a system call: one shared array of 64-bit integers."""

from __future__ import annotations

import multiprocessing
from enum import IntEnum
from typing import Protocol

RUNNING, FINISH_STEP = 0, 1


class Cells(Protocol):
    """An array of integers: shared memory between processes, or a list inside one."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


class _Head(IntEnum):
    """Cells of the run."""

    STOP = 0
    SIGNAL = 1
    SHOW_STACKS = 2


class _Row(IntEnum):
    """Cells of one rank; only that rank writes them."""

    BEATS = 0
    STEP = 1
    TICKS = 2
    PATIENCE = 3


class Board:
    """The shared state of one run. Each cell has one kind of writer, so no lock is needed.

    Not a channel: a cell holds the latest value only, and a writer never waits for a reader.
    """

    def __init__(self, world: int, cells: Cells) -> None:
        self.world = world
        self._cells = cells

    @classmethod
    def shared(cls, world: int) -> Board:
        """A board that processes started by `multiprocessing` inherit (fork) or receive (spawn)."""
        return cls(world, multiprocessing.RawArray("q", _size(world)))

    @classmethod
    def private(cls, world: int = 1) -> Board:
        """A board for one process without a launcher (torchrun, or a test)."""
        return cls(world, [0] * _size(world))

    # the run

    @property
    def stop_level(self) -> int:
        """RUNNING, or FINISH_STEP once somebody asked the run to finish its step, save and end."""
        return self._cells[_Head.STOP]

    @property
    def stop_signal(self) -> int:
        """The signal that asked for the stop, 0 if none did."""
        return self._cells[_Head.SIGNAL]

    def ask_to_stop(self, signal_number: int) -> None:
        """Ask every rank to finish its step, save and end."""
        self._cells[_Head.SIGNAL] = signal_number
        self._cells[_Head.STOP] = FINISH_STEP

    @property
    def stacks_wanted(self) -> bool:
        """Whether the launcher wants to know where each rank is."""
        return bool(self._cells[_Head.SHOW_STACKS])

    def ask_for_stacks(self) -> None:
        """Ask every rank to report the stack of its main thread."""
        self._cells[_Head.SHOW_STACKS] = 1

    # one rank

    def beat(self, rank: int, step: int) -> None:
        """`rank` made progress; `step` is the last step that it finished."""
        self._put(rank, _Row.STEP, step)
        self._put(rank, _Row.BEATS, self.beats(rank) + 1)

    def beats(self, rank: int) -> int:
        """How often `rank` has reported progress."""
        return self._get(rank, _Row.BEATS)

    def step(self, rank: int) -> int:
        """The last step that `rank` finished."""
        return self._get(rank, _Row.STEP)

    def tick(self, rank: int) -> None:
        """`rank` is alive, whatever its main thread does."""
        self._put(rank, _Row.TICKS, self.ticks(rank) + 1)

    def ticks(self, rank: int) -> int:
        """How often the watch thread of `rank` has ticked."""
        return self._get(rank, _Row.TICKS)

    def be_patient(self, rank: int, change: int) -> None:
        """`rank` enters (+1) or leaves (-1) work that may take longer than the timeout."""
        self._put(rank, _Row.PATIENCE, self._get(rank, _Row.PATIENCE) + change)

    def is_patient(self, rank: int) -> bool:
        """Whether `rank` is in work that may take longer than the timeout."""
        return self._get(rank, _Row.PATIENCE) > 0

    def _get(self, rank: int, cell: _Row) -> int:
        return self._cells[len(_Head) + rank * len(_Row) + cell]

    def _put(self, rank: int, cell: _Row, value: int) -> None:
        self._cells[len(_Head) + rank * len(_Row) + cell] = value


def _size(world: int) -> int:
    return len(_Head) + world * len(_Row)

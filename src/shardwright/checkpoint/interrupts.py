"""Ctrl-C, and what else a program's signal handlers raise, comes where the other ranks hear of it.

A rank that leaves a call amid a collective, or between two of them, leaves the others in it, and what it
sends next meets what they wait for: gloo ends the process then, or the ranks' loops are a call apart.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Interrupts:
    """The signals that come in a call: at once inside of `open`, else where they are delivered next.

    A second one of a kind is not held: whoever insists leaves. Only the main thread is told of signals.
    """

    def __init__(self) -> None:
        """None is held yet."""
        self._old: dict[int, Any] = {}
        self._came: list[int] = []
        self._held: set[int] = set()
        self._open = self._holding = False

    def hold(self) -> None:
        """Stand in for the program's handlers."""
        self._holding = True
        if _in_main():
            handlers = {one: signal.getsignal(one) for one in signal.valid_signals()}
            self._old = {one: handler for one, handler in handlers.items() if callable(handler)}
        try:
            for number in self._old:
                signal.signal(number, self._hear)
        except BaseException:  # of one that is not held yet: nobody will release what is
            self.release()
            raise

    def release(self) -> None:
        """Give the program its handlers back, but where it has set others meanwhile, and deliver."""
        interrupt: BaseException | None = None
        for number, handler in self._old.items():
            try:
                if signal.getsignal(number) == self._hear:
                    signal.signal(number, handler)
            except BaseException as error:  # noqa: BLE001  of one that is back already: the others follow
                interrupt = error
        self._holding = False  # who took ours for its own may put it back later
        try:
            self.deliver()
        finally:
            if interrupt is not None:
                raise interrupt

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Inside, signals come at once; what was held comes at the beginning.

        A thread that goes on with a call opens nothing: the main thread may be in it, amid what is one piece.
        """
        if not _in_main():
            yield
            return
        try:
            self._open = True
            self.deliver()
            yield
        finally:
            self._open = False

    def deliver(self) -> None:
        """Call the handlers of what was held; they may raise. A thread has none of it to deliver."""
        while self._came and _in_main():
            self._old[number := self._came.pop(0)](number, None)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._open or not self._holding or number in self._held:
            self._old[number](number, frame)
            return
        self._held.add(number)
        self._came.append(number)


def _in_main() -> bool:
    return threading.current_thread() is threading.main_thread()

"""Ranks whose zygote is forked from the process that all workers of a run share."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from pathlib import Path

from shardwright.testing.pool import RankPool
from shardwright.testing.worlds import Zygote
from tests import forks


class _Forked(Zygote):
    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="shardwright-ranks-", ignore_cleanup_errors=True)
        self._path, self._made = Path(self._folder.name), 0
        (self._path / "zygote.out").symlink_to(forks.folder() / "out")
        self._control = forks.connected("ranks")

    def close(self) -> None:
        """Let it kill its ranks; it closes its end once it has."""
        with self._control, contextlib.suppress(OSError):
            self._control.settimeout(5)
            self._control.shutdown(socket.SHUT_WR)
            self._control.recv(1)
        self._folder.cleanup()


class SharedPool(RankPool):
    """A pool whose ranks share what `forks.want` said."""

    def _started(self) -> Zygote:
        self._zygote = self._zygote or _Forked()
        return self._zygote

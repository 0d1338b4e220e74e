"""The process that all workers of a run have their ranks and programs forked from.

With one for each worker, torch and what else ranks want would be imported once for each, and torch once more
for programs. The first worker that wants it starts it. Programs are forked where torch alone has been
imported; a worker's ranks from a zygote of its own, which is forked once all is. It ends with the worker that
started it, after the zygotes of the others.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

_IMPORTED = ("torch", "torch.distributed.tensor")
_SECONDS = 120.0  # in which it can be reached, on a machine that is busy
_preload: list[str] = []
_alive: list[socket.socket] = []  # what was started here ends when these are closed


def want(preload: Sequence[str]) -> None:
    """What ranks share, where this process is the one that starts it."""
    _preload[:] = preload


@functools.cache
def folder() -> Path:
    """Where it listens, and writes what it says."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or f"{os.getpid()}-{time.time_ns()}"
    return Path(tempfile.gettempdir()) / f"shardwright-forks-{run}"


def connected(name: str) -> socket.socket:
    """A connection to what forks "ranks" or "programs". Raises: TimeoutError: nobody listens."""
    ends = time.monotonic() + _SECONDS
    while time.monotonic() < ends:
        found = socket.socket(socket.AF_UNIX)
        try:
            found.connect(str(folder() / name))
        except (FileNotFoundError, ConnectionRefusedError):
            found.close()
            if not _start():
                time.sleep(0.01)  # another worker is about to
            continue
        return found
    raise TimeoutError(f"nothing forks {name} at {folder()}")


def _start() -> bool:
    """Start it, unless another worker has made the folder."""
    from shardwright.testing.worlds import _zygote_environment

    try:
        folder().mkdir()
    except FileExistsError:
        return False
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as here:
        here.enter_context(theirs)
        listening = [theirs]
        for name in ("ranks", "programs"):
            listening.append(here.enter_context(socket.socket(socket.AF_UNIX)))
            listening[-1].bind(str(folder() / name))
            listening[-1].listen()
        said = here.enter_context((folder() / "out").open("w"))
        numbers = [one.fileno() for one in listening]
        subprocess.run(
            [sys.executable, "-m", "tests.forks", str(folder()), *map(str, numbers), *_preload],
            stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=_zygote_environment(), pass_fds=numbers,
            start_new_session=True, check=True,
        )  # fmt: skip
    _alive.append(ours)
    return True


def end() -> None:
    """Let go of it."""
    for one in _alive:
        one.close()
    _alive.clear()


def main(at: Path, fds: Sequence[int], preload: Sequence[str]) -> None:
    """Serve until the worker that started it is gone. The one that waits for this process may go on."""
    if os.fork():
        os._exit(0)
    alive, ranks, programs = (socket.socket(fileno=fd) for fd in fds)
    for name in _IMPORTED:
        importlib.import_module(name)
    if os.fork() == 0:
        ranks.close()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what answers
        _serve(programs, alive, _program)
        os._exit(0)
    programs.close()
    from shardwright.testing.zygote import prepare

    prepare(preload)
    zygotes = _serve(ranks, alive, _zygote)
    shutil.rmtree(at, ignore_errors=True)  # whoever comes now starts another
    for pid in zygotes:
        os.waitpid(pid, 0)


def _serve(
    listening: socket.socket, alive: socket.socket, answer: Callable[[socket.socket], None]
) -> list[int]:
    """Fork who answers a connection. Returns: their numbers, once nobody holds the other end of `alive`."""
    pids = []
    while True:
        ready, _, _ = select.select([listening, alive], [], [])
        if alive in ready:
            return pids
        connection, _ = listening.accept()
        pid = os.fork()
        if pid == 0:
            listening.close()
            alive.close()
            answer(connection)
            os._exit(0)
        connection.close()
        pids.append(pid)


def _zygote(connection: socket.socket) -> None:
    from shardwright.testing.zygote import _die_with_parent, serve

    _die_with_parent()
    serve(connection, [])


def _program(connection: socket.socket) -> None:
    """Fork what it asks for; say its number, and how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with Connection(connection.detach()) as wire:
        live, words = wire.recv()
        pid = os.fork()
        if pid == 0:
            wire.close()
            live(*words)
        wire.send(pid)
        wire.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(fd) for fd in sys.argv[2:5]], sys.argv[5:])

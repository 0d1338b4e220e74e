"""The ranks of one world, and the caller's end of the process that they are forked from."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shardwright.testing.rank_device import device_of_ranks
from shardwright.testing.rank_errors import RankError

_SIGNAL_SECONDS = 0.3  # how long a rank may take to write where it is
# One thread per rank, no thread pools before a fork, and gloo on the loopback interface.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
}


class World:
    """The ranks of one world: their sockets, process ids, and the folder that holds what they print."""

    def __init__(self, connections: list[Connection], pids: list[int], folder: Path) -> None:
        self.connections = connections
        self.pids = pids
        self.folder = folder

    @property
    def alive(self) -> bool:
        """False if a rank closed its socket since its last answer (an idle rank has nothing to say)."""
        return not any(connection.poll() for connection in self.connections)

    def pause(self) -> None:
        """Stop the ranks until `resume`: a device of gloo owns a thread that wakes 100 times a second.

        What kills a rank ends one that is stopped as well.
        """
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the ranks go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):  # it died with the zygote: the next call says so
                os.kill(pid, number)

    def printed(self, rank: int) -> str:
        """Return what a rank printed since the last call."""
        return (self.folder / f"{rank}.out").read_text(errors="replace")

    def forget_output(self) -> None:
        """Truncate what ranks printed."""
        for rank in range(len(self.pids)):
            os.truncate(self.folder / f"{rank}.out", 0)

    def hang_up(self) -> None:
        """Close the sockets: ranks that still live leave."""
        for connection in self.connections:
            connection.close()

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Ask ranks where they are; one that is stopped cannot answer."""
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(_SIGNAL_SECONDS)
        return {rank: (self.folder / f"{rank}.stack").read_text() for rank in ranks}


class Zygote:
    """The parent's end of the zygote."""

    def __init__(self, preload: Sequence[str]) -> None:
        device_of_ranks()  # a wrong one is an error here, not in another process
        self._folder = tempfile.TemporaryDirectory(prefix="shardwright-ranks-", ignore_cleanup_errors=True)
        self._path = Path(self._folder.name)
        self._control, theirs = socket.socketpair()
        with theirs, (self._path / "zygote.out").open("w") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shardwright.testing.zygote", str(theirs.fileno()), *preload],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=_zygote_environment(),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the caller, who then ends the ranks
            )
        self._made = 0

    def fork(self, n: int) -> World:
        """Fork n ranks and lead them to each other."""
        folder = self._new_folder(n)
        request = json.dumps({"verb": "fork", "folder": str(folder)}).encode()
        pairs = [socket.socketpair() for _ in range(n)]
        world = World([Connection(ours.detach()) for ours, _ in pairs], [], folder)
        try:
            with contextlib.ExitStack() as theirs:
                fds = [theirs.enter_context(their).fileno() for _, their in pairs]
                world.pids += self._ask(request, fds)["pids"]
            _introduce(world)
        except BaseException:
            world.hang_up()
            raise
        return world

    def _new_folder(self, n: int) -> Path:
        folder = self._path / str(self._made)
        folder.mkdir()
        self._made += 1
        for rank in range(n):
            (folder / f"{rank}.out").touch()
            (folder / f"{rank}.stack").touch()
        return folder

    def end(self, pids: list[int]) -> dict[int, int]:
        """Kill ranks; return the status of each (negative: the signal it died of)."""
        answer = self._ask(json.dumps({"verb": "end", "pids": pids}).encode(), [])
        return {int(pid): status for pid, status in answer["statuses"].items()}

    def close(self) -> None:
        """Let it kill its ranks and leave."""
        self._control.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its ranks die with it
            self._process.wait()
        self._folder.cleanup()

    def _ask(self, request: bytes, fds: list[int]) -> Any:
        answer = b""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._control, [request], fds)
            while not answer.endswith(b"\n"):
                part = self._control.recv(1 << 16)
                if not part:
                    break
                answer += part
        if not answer.endswith(b"\n"):
            text = (self._path / "zygote.out").read_text()
            raise RankError(f"the process that ranks are forked from died:\n{text}", rank=0)
        return json.loads(answer)


def _zygote_environment() -> dict[str, str]:
    source = str(Path(__file__).resolve().parents[2])
    known = os.environ.get("PYTHONPATH")
    path = source if not known else os.pathsep.join((source, known))
    return {**os.environ, **_ENVIRONMENT, "PYTHONPATH": path}


def _introduce(world: World) -> None:
    """Tell every rank the port on which rank 0 holds the store."""
    try:
        port = world.connections[0].recv()
        for connection in world.connections[1:]:
            connection.send(port)
    except (EOFError, OSError) as error:
        text = "".join(world.printed(rank) for rank in range(len(world.pids)))
        raise RankError(f"a rank died before it could serve:\n{text}", rank=0) from error

"""The process that ranks are forked from.

It is started afresh (`python -m shardwright.testing.zygote FD MODULE...`), imports the modules that ranks
will want, and runs nothing else: a process that ran one parallel op owns a thread pool, which a fork does not
copy, and its children hang in their first one. Forking a rank takes milliseconds; starting one, seconds.

It answers two requests on its socket, one at a time: fork ranks, and end ranks. When the socket closes, it
kills its children and leaves, so nothing remains of a pool whose owner was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from shardwright.testing.rank_device import device_of_ranks
from shardwright.testing.rank_process import MAX_RANKS, RankSeat, run_rank

_MESSAGE_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1
# When a rank looks for cycles among its objects: deciding makes many objects and few cycles, and at Python's
# own pace a rank spends a tenth of its time on looking.
SELDOM = (50_000, 20, 50)


def main(argv: list[str]) -> None:
    """Preload and serve until the owner closes its end of the socket."""
    control = socket.socket(fileno=int(argv[0]))
    # CUDA, which an import may start, knows no forks: there each rank imports for itself.
    shared, alone = (argv[1:], []) if device_of_ranks() == "cpu" else ([], argv[1:])
    prepare(shared)
    serve(control, alone)


def prepare(shared: list[str]) -> None:
    """Import what ranks share, and become what they are forked from."""
    _wake_without_interrupting()
    gc.disable()  # what modules make stays: a fifth of the time of an import goes into looking through it
    for name in shared:
        _preload(name)
    _check_single_threaded()
    gc.freeze()  # a collection in a child would otherwise touch, and so copy, every page
    gc.set_threshold(*SELDOM)
    gc.enable()


def _wake_without_interrupting() -> None:
    """Let no rank take the processor from another that just sent it something.

    The sender still holds the lock of its socket then, and on fewer processors than ranks gloo's own thread,
    which only tries that lock, spins until the sender goes on: a tenth of all the time of a suite.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # where it is not allowed, a suite takes longer
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _preload(name: str) -> None:
    """Import a module; where that fails, a rank that needs it will fail at it too, and tell its caller."""
    try:
        importlib.import_module(name)
    except Exception:  # noqa: BLE001 - whatever a module raises while it is imported
        traceback.print_exc()


def _check_single_threaded() -> None:
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        return
    threads = len(list(tasks.iterdir()))
    if threads > 1:
        raise RuntimeError(
            f"{threads} threads run after importing what ranks want; a fork copies only one of them, "
            "so an import must not start a thread nor run a parallel op"
        )


def serve(control: socket.socket, alone: list[str]) -> None:
    """Answer until the owner is gone. alone: what each rank imports for itself."""
    children: set[int] = set()
    while True:
        message, fds, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, MAX_RANKS)
        if not message:
            _end(children)
            return
        request = json.loads(message)
        if request["verb"] == "fork":
            pids = _fork(control, fds, Path(request["folder"]), alone)
            children.update(pids)
            answer: dict[str, Any] = {"pids": pids}
        else:
            doomed = children.intersection(request["pids"])
            answer = {"statuses": _end(doomed)}
            children -= doomed
        control.sendall(json.dumps(answer).encode() + b"\n")


def _fork(control: socket.socket, fds: list[int], folder: Path, alone: list[str]) -> list[int]:
    pids = []
    for rank, fd in enumerate(fds):
        pid = os.fork()
        if pid == 0:
            control.close()
            for other in fds:
                if other != fd:
                    os.close(other)
            _live(RankSeat(rank, len(fds), fd, folder), alone)
        pids.append(pid)
    for fd in fds:
        os.close(fd)
    return pids


def _live(seat: RankSeat, alone: list[str]) -> NoReturn:
    """Be a rank until the end; never return into the loop of the parent."""
    status = 1
    try:
        _die_with_parent()
        for name in alone:
            _preload(name)
        run_rank(seat)
        status = 0
    except BaseException:  # noqa: BLE001 - what a rank dies of goes to its output, which the pool shows
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end(pids: set[int]) -> dict[str, int]:
    """Kill and reap; a rank that was dead already keeps the status it died with (negative: the signal)."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)  # harmless to the dead: they keep their number until they are reaped
    return {str(pid): os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids}


if __name__ == "__main__":
    main(sys.argv[1:])

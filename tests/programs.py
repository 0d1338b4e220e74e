"""Programs that begin where torch has been imported, and nothing else: forks of a process that did no more.

To import it takes a program of its own two seconds of processor time. A fork begins with the same modules,
arguments, environment and output as that program would, and ends as Python ends.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import CompletedProcess

from tests import forks


class Program:
    """A program that runs: source code, or a file.

    Args:
        source: the code, or where it is.
        words: its arguments.
        environment: more than this process has.
    """

    def __init__(self, source: str | Path, *words: str, environment: Mapping[str, str] = os.environ) -> None:
        sys.audit("os.fork")  # which another process does
        self._folder = tempfile.TemporaryDirectory(prefix="shardwright-program-")
        self._said = [Path(self._folder.name) / name for name in ("out", "errors")]
        given = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self._wire = Connection(forks.connected("programs").detach())
        self._wire.send((_live, (source, words, given, self._said, Path.cwd(), sys.path)))
        self._pid = self._wire.recv()

    def end(self, timeout: float = 120) -> CompletedProcess[str]:
        """How it ended, and what it said. Raises: TimeoutError: it has not ended in time, and is killed."""
        ended = self._wire.poll(timeout)
        if not ended:
            os.kill(self._pid, signal.SIGKILL)
        code = self._wire.recv()
        self._wire.close()
        out, errors = (path.read_text() if path.exists() else "" for path in self._said)
        self._folder.cleanup()
        if not ended:
            raise TimeoutError(f"a program went on for more than {timeout:g} s; it said {out!r}, {errors!r}")
        return CompletedProcess([], code, out, errors)


def _live(
    source: str | Path,
    words: tuple[str, ...],
    environment: dict[str, str],
    said: list[Path],
    folder: Path,
    modules: list[str],
) -> None:
    """Be the program, to the end of the interpreter."""
    os.chdir(folder)
    for number, path in enumerate(said, start=1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [str(source) if isinstance(source, Path) else "-c", *words]
    sys.path[:] = [*environment.get("PYTHONPATH", "").split(os.pathsep), *modules]
    ctypes.pythonapi.Py_Exit(_code_of(source))


def _code_of(source: str | Path) -> int:
    """The exit code, as Python has it."""
    try:
        if isinstance(source, Path):
            runpy.run_path(str(source), run_name="__main__")
        else:
            exec(compile(source, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102 - as `-c` does
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:  # noqa: BLE001 - told as Python tells it
        sys.excepthook(*sys.exc_info())
        return 1
    return 0

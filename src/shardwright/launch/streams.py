"""Standard output and error that outlast who reads them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO, cast


class _Lasting:
    """A stream whose text is lost where nobody takes it; that is no error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write what can be written; what its encoding has no letter for, escaped."""
        coding = self._stream.encoding or "utf-8"
        with self._tolerant():
            self._stream.write(text.encode(coding, "backslashreplace").decode(coding))
        return len(text)

    def flush(self) -> None:
        """Hand on what was written."""
        with self._tolerant():
            self._stream.flush()

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:  # for good; what Python still holds would be an error at its exit
            with contextlib.suppress(OSError), Path(os.devnull).open("w", encoding="utf-8") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
        except OSError:
            pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting_streams() -> Iterator[None]:
    """Let no write to standard output or error fail inside: closed, on a full disk, or without a reader.

    `train | tee log`: the Ctrl-C that asks for a checkpoint ends `tee` at once.
    """
    _open_standard_files()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _lasting(sys.stdout, 1), _lasting(sys.stderr, 2)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _open_standard_files() -> None:
    """Open those that are closed, to nowhere: a file or socket of the run would get their numbers."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)


def _lasting(stream: TextIO | None, number: int) -> TextIO:
    """The stream, which Python has left out (None) where it was closed."""
    return cast(TextIO, _Lasting(stream or open(number, "w", encoding="utf-8", closefd=False)))

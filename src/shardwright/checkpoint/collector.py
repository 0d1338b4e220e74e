"""Python's collector of cycles waits while a save or a load makes its many small objects.

They hold no cycles and go by their counts. A full collection walks every object of the process, torch's half
a million among them: one of those took longer than a save of 2,000 tensors, and it stops every thread.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_waiting = 0  # how many wait for it to begin again: saves of a thread and of the run overlap


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """No collection begins by itself inside; afterwards it is as it was, also where the user has none."""
    global _waiting  # noqa: PLW0603  the collector is one for the process
    with _lock:
        ours = _waiting > 0 or gc.isenabled()
        if ours:
            _waiting += 1
            gc.disable()
    try:
        yield
    finally:
        with _lock:
            if ours:
                _waiting -= 1
                if not _waiting:
                    gc.enable()

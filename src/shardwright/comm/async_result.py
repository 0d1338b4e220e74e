"""Results that are still under way when they are handed out."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor


class Later:
    """A tensor whose last step is under way; `wait()` finishes it, once, in whichever thread asks first.

    Nobody needs to ask: one that is thrown away is finished then, because its buffers are being written to
    and its peers count on it.
    """

    __slots__ = ("__weakref__", "_parts", "_state")

    def __init__(self, finish: Callable[[], Tensor], parts: Iterable[tuple[int, Tensor]] = ()) -> None:
        self._state, self._parts = _State(finish), parts
        weakref.finalize(self, self._state.result).atexit = False

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """A rank, and the tensor with that one's part in it: one after another, as they arrive.

        Of as many as are told apart, perhaps of none; `wait()` is for all, and for their order.
        """
        return iter(self._parts)

    def wait(self) -> Tensor:
        """The tensor. Blocks until what it needs has arrived."""
        return self._state.result()


class _State:
    __slots__ = ("_finish", "_inference", "_lock", "_results")

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish = finish
        self._results: list[Tensor] = []
        self._lock = threading.Lock()
        self._inference = torch.is_inference_mode_enabled()

    def result(self) -> Tensor:
        with self._lock:
            if not self._results:
                # As where it was started: whoever asks first decides nothing about the result.
                with torch.inference_mode(self._inference), torch.no_grad():
                    self._results.append(self._finish())
                del self._finish  # and the buffers that it holds
            return self._results[0]

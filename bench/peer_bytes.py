"""What a program sends through torch's functional collectives, counted from its calls.

A dispatch mode sees every collective that torch's DTensor calls, with its operand. Counted is what the usual
algorithms send: a gather n-1 times the operand, an all-reduce 2(n-1)/n of it, a reduce-scatter and an
all-to-all the parts of the others. (gloo's reduce-scatter in fact sends twice that.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

_SENT: dict[str, Callable[[int, int], float]] = {
    "all_gather_into_tensor": lambda size, n: (n - 1) * size,
    "all_reduce": lambda size, n: 2 * (n - 1) * size / n,
    "reduce_scatter_tensor": lambda size, n: (n - 1) * size / n,
    "all_to_all_single": lambda size, n: (n - 1) * size / n,
    "broadcast": lambda size, n: (n - 1) * size / n,
}
_FREE = ("wait_tensor", "_wrap_tensor_autograd")


class CountedBytes(TorchDispatchMode):
    """Adds up what this rank's functional collectives send, in `sent`.

    Raises: NotImplementedError: a collective whose bytes are not known here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("_c10d_functional", "c10d_functional", "_dtensor"):
            self._count(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        if name in _FREE:
            return
        if name not in _SENT:
            raise NotImplementedError(f"the bytes of {name} are not counted here")
        self.sent += _SENT[name](args[0].nbytes, _group(args[-1]).size())


def _group(given: Any) -> ProcessGroup:
    return given if isinstance(given, ProcessGroup) else _resolve_process_group(given)


def bytes_sent(program: Callable[[], object]) -> float:
    """Bytes that this rank sends in one call."""
    with torch.no_grad(), CountedBytes() as counted:
        program()
    return counted.sent

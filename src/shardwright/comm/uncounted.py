"""Messages between pairs of ranks, which torch's `CommDebugMode` does not count."""

from __future__ import annotations

import warnings

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_said = False


def say_if_uncounted() -> None:
    """Warn once, where a `CommDebugMode` is on: it counts collectives, and these messages are none.

    Cost: none but one look at the number of active modes.
    """
    global _said  # noqa: PLW0603 - once per process
    if _said or not torch._C._len_torch_dispatch_stack():
        return
    if any(type(mode).__name__ == "CommDebugMode" for mode in _get_current_dispatch_mode_stack()):
        _said = True
        warnings.warn(
            "CommDebugMode counts collectives only; this program also sends messages between pairs of ranks, "
            "which it does not count: sw.trace() lists both",
            stacklevel=2,
        )

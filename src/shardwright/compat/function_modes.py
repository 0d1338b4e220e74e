"""Modes of torch's function protocol, where it has no public name for what is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import overrides
from torch.utils._device import DeviceContext

if TYPE_CHECKING:
    import torch
    from torch.overrides import TorchFunctionMode


def default_devices() -> tuple[torch.device, ...] | None:
    """Where tensors are made if nobody says so, for each `torch.device` block; None if another mode is on."""
    modes = overrides._get_current_function_mode_stack()
    found = tuple(mode.device for mode in modes if isinstance(mode, DeviceContext))
    return found if len(found) == len(modes) else None


class PushedDown:
    """A mode is off inside, if it is the innermost: functions are as fast as without it."""

    def __init__(self, mode: TorchFunctionMode | None) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._popped = self._mode is not None and overrides._get_current_function_mode() is self._mode
        if self._popped:
            overrides._pop_mode()

    def __exit__(self, *error: object) -> None:
        if self._popped:
            overrides._push_mode(self._mode)

"""One device of gloo for all process groups of a rank."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

import torch.distributed.distributed_c10d as c10d
from torch.distributed import Store

_Gloo: Any = c10d.ProcessGroupGloo  # its options have other names than torch's stubs say


def share_one_device() -> None:
    """Let the groups that this process makes from now on share a device.

    By default each has its own: a thread that wakes a hundred times a second, whoever computes. A rank of a
    few meshes has twenty, and the ranks of a few worlds take a tenth of a core to find that nothing came.
    """
    c10d.ProcessGroupGloo = _OfOneDevice  # type: ignore[misc]


class _OfOneDevice(_Gloo):  # type: ignore[misc]
    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        options = _Gloo._Options()
        options._devices, options._timeout = [_device(os.getpid())], timeout
        super().__init__(store, rank, size, options)


@functools.cache
def _device(_process: int) -> Any:
    """The device of a process: one that a rank forks has not the thread of its parent's."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return _Gloo.create_device(interface=interface) if interface else _Gloo.create_default_device()

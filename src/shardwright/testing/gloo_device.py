"""One device of gloo for all process groups of a rank."""

from __future__ import annotations

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
    _process = 0
    _device: Any = None
    _of_parent: Any = None

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, **others: Any) -> None:
        options = _Gloo._Options()
        options._devices, options._timeout = [self._device_of_process()], timeout
        for name, value in others.items():  # what later releases add (2.14: enable_reconfigure)
            setattr(options, name, value)
        super().__init__(store, rank, size, options)

    @classmethod
    def _device_of_process(cls) -> Any:
        """A process that a rank forks makes its own: it has not the thread of its parent's.

        It keeps its parent's, whose end would wait for that thread.
        """
        if cls._process != os.getpid():
            cls._process, cls._of_parent = os.getpid(), (cls._device, cls._of_parent)
            cls._device = _made()
        return cls._device


def _made() -> Any:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return _Gloo.create_device(interface=interface) if interface else _Gloo.create_default_device()

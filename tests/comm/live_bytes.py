"""The bytes that are really held while something runs."""

from __future__ import annotations

import time

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PATIENCE = 10.0  # seconds in all


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that were made inside the block and are still alive, after every op.

    A thread of the backend that a busy machine stopped may hold the buffers of an exchange that has ended.
    What the caller holds stays alive while it waits here, so where the bytes are more than allowed, such
    threads get the time to let go before the bytes are counted.
    """

    def __init__(self, *known: torch.Tensor, allowed: int, patience: float | None = None) -> None:
        super().__init__()
        self.allowed, self.patience = allowed, PATIENCE if patience is None else patience
        self.known = {StorageWeakRef(x.untyped_storage()).cdata for x in known}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._forget_dead()  # what died before this op is not held while it runs; what it returns is
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                ref = StorageWeakRef(storage)
                if ref.cdata not in self.known:
                    self.alive[ref.cdata] = ref, storage.nbytes()
        self.most = max(self.most, self._held())
        return out

    def _held(self) -> int:
        while (held := sum(size for _, size in self.alive.values())) > self.allowed and self.patience > 0:
            time.sleep(0.01)
            self.patience -= 0.01
            self._forget_dead()
        return held

    def _forget_dead(self) -> None:
        self.alive = {at: item for at, item in self.alive.items() if not item[0].expired()}

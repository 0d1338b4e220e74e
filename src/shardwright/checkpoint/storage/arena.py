"""Memory for what is loaded before anything is changed: one block, in large pages if possible."""

from __future__ import annotations

import mmap
from math import prod

import torch

_ALIGNED = 64
_HUGE = 2 << 20


class Arena:
    """Hands out tensors from one block of memory of a known size; it goes when the last of them goes."""

    def __init__(self, nbytes: int) -> None:
        """Args: nbytes: the sum of `room_for` over the tensors that will be asked for."""
        self._at, self._block = 0, torch.empty(0, dtype=torch.uint8)
        if nbytes:
            memory = mmap.mmap(-1, -(-nbytes // _HUGE) * _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._block = torch.frombuffer(memory, dtype=torch.uint8)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor on the CPU, of any content."""
        nbytes = prod(shape) * dtype.itemsize
        if not nbytes:
            return torch.empty(shape, dtype=dtype)
        found = self._block[self._at : self._at + nbytes]
        self._at += room_for(nbytes)
        return found.view(dtype).view(shape)


def room_for(nbytes: int) -> int:
    """What a tensor of so many bytes takes of an arena."""
    return -(-nbytes // _ALIGNED) * _ALIGNED

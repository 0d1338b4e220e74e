"""Memory for what is loaded before anything is changed: one block, in large pages if possible."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Iterator
from math import prod

import torch

from shardwright.checkpoint.storage.stream import copy_memory
from shardwright.comm.dtype import as_bytes

_ALIGNED = 64
_HUGE = 2 << 20
_LARGE = 1 << 20
_TRIED = 4  # large pages that are timed
_SLOW = 0.0005  # seconds of one of them; small pages of as many bytes take twice that


class Arena:
    """Hands out tensors from one block of memory of a known size; it goes when the last of them goes."""

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        """Make the block.

        Args:
            nbytes: the sum of `room_for` over the tensors that will be asked for.
            pinned: in memory that an accelerator copies to by itself.
        """
        self.pinned = pinned
        size = nbytes if pinned else 0
        self._at, self._block = 0, torch.empty(size, dtype=torch.uint8, pin_memory=pinned, device="cpu")
        if nbytes and not pinned:
            memory = mmap.mmap(-1, -(-nbytes // _HUGE) * _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            _in_large_pages(memory)
            self._block = torch.frombuffer(memory, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return self._block.nbytes

    def start_anew(self) -> None:
        """Hand out the block once more; what was handed out before must be out of use."""
        self._at = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor on the CPU, of any content."""
        nbytes = prod(shape) * dtype.itemsize
        if not nbytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        found = self._block[self._at : self._at + nbytes]
        self._at += room_for(nbytes)
        return found.view(dtype).view(shape)


@contextlib.contextmanager
def usable_afterwards() -> Iterator[None]:
    """What is made inside are ordinary tensors, whatever the mode outside.

    Those of `torch.inference_mode()` can neither be trained nor written outside of it, and what a load makes
    (the states of an optimizer, parameters that had no memory) stays.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def _in_large_pages(memory: mmap.mmap) -> None:
    """Ask for large pages, as long as the first of them come faster than small ones would.

    They do, by five times, where the system has them at hand. A virtual machine that gives free ones back to
    its host must fetch each anew, and then they are slower than small ones, by as much.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    memory.madvise(mmap.MADV_HUGEPAGE)
    tried = min(len(memory), _TRIED * _HUGE)
    start = time.thread_time()
    for at in range(0, tried, _HUGE):
        memory[at] = 0
    if time.thread_time() - start > _SLOW * (tried // _HUGE):
        memory.madvise(mmap.MADV_NOHUGEPAGE)


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """`target.copy_(source)`; where both are large and lie on the CPU in one piece, past the cache."""
    plain = target.dtype == source.dtype and target.nbytes > _LARGE
    if not plain or not (_in_one_piece(target) and _in_one_piece(source)):
        target.copy_(source)
        return
    fill(target, as_bytes(source.detach()).numpy().data)


def fill(target: torch.Tensor, data: memoryview) -> None:
    """Give a tensor that lies on the CPU in one piece the bytes of `data`."""
    copy_memory(as_bytes(target.detach()).numpy().data, data)
    if not target.is_inference():
        torch.autograd.graph.increment_version(target)


def _in_one_piece(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.is_contiguous() and not (x.is_conj() or x.is_neg())


def room_for(nbytes: int) -> int:
    """What a tensor of so many bytes takes of an arena."""
    return -(-nbytes // _ALIGNED) * _ALIGNED

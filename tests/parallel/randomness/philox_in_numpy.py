"""Philox4x32-10 after Salmon and others (SC11), in numpy: what masks by logical index are compared with."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

_M = (0xD2511F53, 0xCD9E8D57)
_W = (0x9E3779B9, 0xBB67AE85)


def words(count: int, key: int) -> np.ndarray:
    """The first `count` words of 32 bits of the stream of a key."""
    c = [np.arange(-(-count // 4), dtype=np.uint64), *(np.zeros(-(-count // 4), np.uint64) for _ in range(3))]
    k = [key & 0xFFFFFFFF, key >> 32]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p, q = c[0] * np.uint64(_M[0]), c[2] * np.uint64(_M[1])
        c = [
            (q >> np.uint64(32)) ^ c[1] ^ np.uint64(k[0]),
            q & low,
            (p >> np.uint64(32)) ^ c[3] ^ np.uint64(k[1]),
            p & low,
        ]
        k = [(k[0] + _W[0]) & 0xFFFFFFFF, (k[1] + _W[1]) & 0xFFFFFFFF]
    return np.stack(c, -1).reshape(-1)[:count]


def kept(shape: tuple[int, ...], keep: float) -> torch.Tensor:
    """The mask of a tensor, by a key that the generator of the CPU gives: 1 where an element stays."""
    key = int(torch.empty((), dtype=torch.int64).random_())
    count = int(np.prod(shape))
    drawn = words(count, key).astype(np.int64) < round(keep * 2**32)
    return torch.from_numpy(drawn.reshape(shape)).to(torch.float32)


class Dropout(nn.Module):
    """Dropout of the whole batch on one device."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x):
        return x * kept(tuple(x.shape), 1 - self.p) / (1 - self.p)

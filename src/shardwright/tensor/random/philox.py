"""Philox4x32-10: 128 random bits as a function of a counter and a key, without state, in torch's integer ops.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11, section 3.3
(constants and round); its known answers are pinned in the tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # the golden ratio, and sqrt(3) - 1
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Four words per counter.

    Args:
        counter: four int64 tensors of one shape with values in [0, 2**32); they are not changed.
        key: two numbers in [0, 2**32).

    Returns: four int64 tensors of that shape with values in [0, 2**32), the same on every device.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1 = high1.bitwise_xor_(c1).bitwise_xor_(k0), low1
        c2, c3 = high0.bitwise_xor_(c3).bitwise_xor_(k1), low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Upper and lower word of a 64-bit product. torch's int64 wraps, so the bits are those of uint64."""
    product = x * factor
    return (product >> 32).bitwise_and_(_WORD), product.bitwise_and_(_WORD)


def blocks(index: Tensor, key: tuple[int, int]) -> Words:
    """The four words of the blocks with these numbers:  [n] -> 4 x [n]."""
    zeros = torch.zeros_like(index)
    return philox((index & _WORD, index >> 32, zeros, zeros), key)


def split_key(key: int) -> tuple[int, int]:
    """The two words of a 64-bit key, the lower one first."""
    return key & _WORD, (key >> 32) & _WORD

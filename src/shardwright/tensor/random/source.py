"""Numbers as a function of a key and of logical indices: block i of the flattened tensor is Philox(i, key).

A block of 128 bits serves four elements of up to 32 bits or two of 64: element j of a tensor takes number
j % 4 (or j % 2) of block j // 4 (j // 2), whoever holds it. Integers and uniform numbers are the same bits on
every device; what goes through log, cos or exp is computed in double precision and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.layout.layout import Layout
from shardwright.tensor.random.logical_index import indices_of, interval_of
from shardwright.tensor.random.philox import Words, blocks, split_key
from shardwright.tensor.random.rows import BatchRows

# Blocks per step: on a CPU what one step touches stays in its cache.
_STEP = {"cpu": 1 << 15}
_STEP_ELSEWHERE = 1 << 22
_DIGITS = {torch.float16: 11, torch.bfloat16: 8}  # of the significand: a uniform number must stay below 1
_DIGITS_OF_OTHERS = 24
_SMALL_RANGE = 1 << 31
_WORD = (1 << 32) - 1

Transform = Callable[[Words], tuple[Tensor, ...]]


def draw_key(generator: torch.Generator | None) -> int:
    """A key of 63 bits: one draw from the generator (the CPU's default one, whatever the device)."""
    device = "cpu" if generator is None else generator.device
    return int(torch.empty((), dtype=torch.int64, device=device).random_(generator=generator))


@dataclass(frozen=True, slots=True)
class CounterSource:
    """The random numbers of one op for what one rank holds.

    Args:
        key: of the op; the same on all ranks.
        layout: of the tensor that is filled; a Pending axis counts as replicated.
        coords: of the rank.
        device: where the numbers are computed.
        rows: where this rank's rows stand in the whole batch, for what drops elements of them.
    """

    key: int
    layout: Layout
    coords: tuple[int, ...]
    device: torch.device
    rows: BatchRows | None = None

    def uniform(self, dtype: torch.dtype, first: int | None = None) -> Tensor:
        """In [0, 1), as many bits as the dtype has digits; `first` as of `_values`."""
        if dtype == torch.float64:
            return self._values(lambda w: (_unit_double(*w[:2]), _unit_double(*w[2:])), 2, dtype, first)
        shift = 32 - _DIGITS.get(dtype, _DIGITS_OF_OTHERS)
        return self._values(lambda words: tuple(_unit(w, shift) for w in words), 4, torch.float32, first)

    def slopes(self, dtype: torch.dtype) -> Tensor:
        """Uniform numbers of each element of activations, whose rows stand as those of a mask."""
        return self.uniform(dtype, self._first_of_mask())

    def inside(self, dtype: torch.dtype) -> Tensor:
        """In (0, 1), both ends excluded, in double precision: what logarithms are taken of."""
        transform = _inside_wide if dtype == torch.float64 else _inside
        return self._values(transform, 2 if dtype == torch.float64 else 4, torch.float64)

    def normal(self, dtype: torch.dtype) -> Tensor:
        """Standard normal, in pairs by the method of Box and Muller (1958), in double precision."""
        transform = _normal
        if dtype == torch.float64:
            transform = lambda words: _box_muller(*_inside_wide(words))  # noqa: E731
        return self._values(transform, 2 if dtype == torch.float64 else 4, torch.float64)

    def integers(self, low: int, count: int) -> Tensor:
        """In [low, low + count), int64; the bias is at most count / 2**32 (2**63 for long ranges)."""
        if count <= _SMALL_RANGE:
            return self._values(lambda w: w, 4, torch.int64).mul_(count).bitwise_right_shift_(32).add_(low)
        return _scaled(self._values(_positive, 2, torch.int64), count).add_(low)

    def fraction(self) -> Tensor:
        """In [0, 1), 32 bits in double precision: what probabilities are compared with."""
        return self._values(lambda w: w, 4, torch.float64).mul_(2.0**-32)

    def below(self, probability: float) -> Tensor:
        """Whether a draw of 32 bits is below the probability; bool."""
        return self._values(lambda w: w, 4, torch.int64, self._first_of_mask()) < round(probability * 2**32)

    def _first_of_mask(self) -> int:
        return 0 if self.rows is None else self.rows.first_of(tuple(self.layout.shape))

    def _values(
        self, transform: Transform, per_block: int, dtype: torch.dtype, first: int | None = None
    ) -> Tensor:
        """The transformed numbers of the elements held, in the local shape.

        Args: first: of the tensor, in the whole batch; None: by its rows, if it begins with them.
        """
        shape = self.layout.local_shape(self.coords)
        if first is None:
            first = 0 if self.rows is None else self.rows.offset_of(tuple(self.layout.shape))
        interval = interval_of(self.layout, self.coords)
        if interval is None:
            found = self._scattered(first, transform, per_block, dtype)
        else:
            found = self._interval(first + interval[0], interval[1], transform, per_block, dtype)
        return found.reshape(shape)

    def _interval(
        self, start: int, count: int, transform: Transform, per_block: int, dtype: torch.dtype
    ) -> Tensor:
        first, last = start // per_block, -(-(start + count) // per_block)
        index = torch.arange(first, last, device=self.device)
        made = self._of_blocks(index, transform, per_block, dtype)
        return made[start - first * per_block :][:count]

    def _scattered(self, first: int, transform: Transform, per_block: int, dtype: torch.dtype) -> Tensor:
        index = indices_of(self.layout, self.coords, self.device).add_(first)
        wanted, place = torch.unique_consecutive(index // per_block, return_inverse=True)
        made = self._of_blocks(wanted, transform, per_block, dtype)
        return made[place.mul_(per_block).add_(index.remainder_(per_block))]

    def _of_blocks(self, index: Tensor, transform: Transform, per_block: int, dtype: torch.dtype) -> Tensor:
        """All numbers of some blocks, in order:  [n] -> [n * per_block]."""
        out = torch.empty(len(index), per_block, dtype=dtype, device=self.device)
        step = _STEP.get(self.device.type, _STEP_ELSEWHERE)
        for at in range(0, len(index), step):
            made = transform(blocks(index[at : at + step], split_key(self.key)))
            torch.stack([value.to(dtype) for value in made], dim=-1, out=out[at : at + step])
        return out.reshape(-1)


def _unit(word: Tensor, shift: int) -> Tensor:
    return (word >> shift).to(torch.float32).mul_(2.0 ** (shift - 32))


def _unit_double(low: Tensor, high: Tensor) -> Tensor:
    """53 bits of two words."""
    return ((high << 21) | (low >> 11)).to(torch.float64).mul_(2.0**-53)


def _inside(words: Words) -> tuple[Tensor, ...]:
    return tuple(w.to(torch.float64).add_(0.5).mul_(2.0**-32) for w in words)


def _inside_wide(words: Words) -> tuple[Tensor, ...]:
    return _inside_double(words[0], words[1]), _inside_double(words[2], words[3])


def _inside_double(low: Tensor, high: Tensor) -> Tensor:
    """52 bits of two words and a half: exact in double precision, so never 0 and never 1."""
    return ((high << 20) | (low >> 12)).to(torch.float64).add_(0.5).mul_(2.0**-52)


def _normal(words: Words) -> tuple[Tensor, ...]:
    u, v, x, y = _inside(words)
    return *_box_muller(u, v), *_box_muller(x, y)


def _box_muller(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    radius, angle = u.log().mul_(-2.0).sqrt_(), v.mul(2 * math.pi)
    return radius * angle.cos(), radius * angle.sin()


def _scaled(x: Tensor, count: int) -> Tensor:
    """`x * count >> 63` of numbers of 63 bits, by halves: the product has 126 bits."""
    x_high, x_low, high, low = x >> 32, x & _WORD, count >> 32, count & _WORD
    cross, across = x_high * low, x_low * high
    middle = ((x_low * low) >> 32 & _WORD) + (cross & _WORD) + (across & _WORD)
    upper = x_high * high + (cross >> 32) + (across >> 32) + (middle >> 32)
    return upper * 2 + (middle >> 31 & 1)


def _positive(words: Words) -> tuple[Tensor, ...]:
    """Two numbers of 63 bits."""
    return tuple(((high & 0x7FFFFFFF) << 32) | low for low, high in (words[:2], words[2:]))

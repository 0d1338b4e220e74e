"""How far a result may be from one device's: as far as rounding moves the program's own answer.

A sum in another order, and a value that a rank rounds before it is combined, move each intermediate by about
the unit of its type. So the reference is run again with every leaf, gradient seed and intermediate moved by
a random `eps` of itself: an answer that then moves by d is not known better than d. The terms of a
reduction of N elements move one by one, which moves the sum by `sqrt(N) * eps`, as another order does.
A step whose own rounding cancels (the cosine of a tensor and itself, taken from 1) is moved op by op inside.
Bound: `SAFETY` times the largest such move in the tensor, and one `eps` of its largest element for each step
and each rank. An integer or bool that moves at all is decided by rounding alone: it is not compared,
but counted. A zero gets either sign, for that of a sum depends on its terms (`-0. + 0.` is `0.`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.testing.rank_device import here
from tests.fuzz.program import Program
from tests.fuzz.run import Env, Outcome, Plain, run

RUNS = 3
SAFETY = 8.0
CANCELLED = 64.0  # units of the largest element
RUNS_FOR_INTEGERS = 32  # an order, or an equality, of near values comes out the same mostly


class Noisy(Plain):
    """One device whose every intermediate is moved by about its rounding, or by so many times that.

    alike: equal elements stay equal, and what cancelled but for rounding is 0, in every other run: another
    kernel may find exactly that.
    """

    def __init__(self, seed: int, times: float = 1.0, *, alike: bool = False) -> None:
        self._generator = torch.Generator(here()).manual_seed(seed)
        self._times = times
        self._alike = alike
        self._flushed = CANCELLED * times if alike and seed % 2 else 0.0

    def after(self, env: Env, names: tuple[str, ...]) -> None:
        for name in names:
            self.shake(env[name])

    def shake(self, x: object) -> None:
        """Move a tensor of floats in place, each element by a random part of its rounding."""
        if not isinstance(x, torch.Tensor) or not (x.is_floating_point() or x.is_complex()):
            return
        if x._is_zerotensor():  # it has no memory
            return
        if not x.numel() or (x._base is not None and not x._version) or _overlaps(x):
            return
        data = x.data
        noise = self._noise(data)
        eps = self._times * torch.finfo(x.dtype).eps
        zeros = (data == 0) & (noise < 0)
        data.copy_(data.to(torch.complex128 if x.is_complex() else torch.float64) * (1 + eps * noise))
        data.copy_(torch.where(zeros, -data, data))
        if self._flushed:
            size = data.abs()
            data.masked_fill_(size < self._flushed * torch.finfo(x.dtype).eps * size.max(), 0)

    def _noise(self, data: torch.Tensor) -> torch.Tensor:
        """From -1 to 1, for each element."""
        if not self._alike:
            return torch.rand(data.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        values = torch.view_as_real(data.resolve_conj())[..., 0] if data.is_complex() else data
        kinds, which = values.unique(return_inverse=True)
        return (torch.rand(kinds.shape, generator=self._generator, dtype=torch.float64) * 2 - 1)[which]


class _Inside(TorchDispatchMode):
    """What every op makes is moved, those of which a step consists and those of the backward too."""

    def __init__(self, noise: Noisy) -> None:
        super().__init__()
        self._noise = noise

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if all(made.alias_info is None or made.alias_info.is_write for made in func._schema.returns):
            for x in tree_leaves(out):
                self._noise.shake(x)
        return out


def _overlaps(x: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))


@dataclass
class Truth:
    """The reference, and the same program under noise, once it is needed."""

    program: Program
    wanted: Outcome
    _noisy: dict[tuple[bool, float, int, bool], Outcome] = field(default_factory=dict)

    def noisy(
        self, *, inside: bool = False, times: float = 1.0, runs: int = RUNS, alike: bool = False
    ) -> Iterator[Outcome]:
        """The runs under noise that end as the reference does; each is made once, when it is asked for.

        inside: noise in the ops of a step too. times: so many times the rounding. runs: how many.
        alike: equal elements stay equal.
        """
        for seed in range(runs):
            key = inside, times, seed, alike
            if key not in self._noisy:
                self._noisy[key] = self._run(Noisy(seed, times, alike=alike), inside)
            found, wanted = self._noisy[key], self.wanted
            if found.step == wanted.step and (found.error is None) == (wanted.error is None):
                yield found

    def decided_by_rounding(self) -> Iterator[Outcome]:
        """Runs under noise, and as much as floats may differ by: an integer that moves is rounding's."""
        for inside, times, alike in product((False, True), (1.0, SAFETY), (False, True)):
            yield from self.noisy(inside=inside, times=times, runs=RUNS_FOR_INTEGERS, alike=alike)

    def _run(self, noise: Noisy, inside: bool) -> Outcome:
        with torch.enable_grad(), _Inside(noise) if inside else nullcontext():
            return run(self.program, noise)


def floor(steps: int, ranks: int, dtype: torch.dtype) -> float:
    """One unit for each step, each rank and each term that a pending leaf is made of."""
    return (steps + ranks + 8) * torch.finfo(dtype).eps

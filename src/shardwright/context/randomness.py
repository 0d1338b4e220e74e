"""The generators of a run: alike while weights are drawn, then a stream for each part of the data."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.nn.modules.module import register_module_forward_pre_hook

from shardwright.errors import ConfigError, ParallelError

LOGICAL = "_shardwright_logical_dropout"  # what a module has whose masks are drawn by logical index
_SEEDS = 2**63
_OF_NUMPY = 2**32
# The hook of the newest seed that waits for a first forward. One per process: it is about torch's default
# generator, of which there is one.
_waiting: list[tuple[Any, Callable[[nn.Module], None]]] = []


class _Streams:
    """What the newest seed said of this rank: its place among the parts, and what they still part from.

    sharing: the ranks of the same part, which draw what this one draws.
    """

    coordinate: tuple[int, ...] | None = None
    sharing: frozenset[int] = frozenset()
    undivided: int | None = None


_streams = _Streams()


def seed_everything(seed: object) -> None:
    """Seed torch (all devices), Python and numpy.

    Raises: ConfigError: no whole number in [0, 2**63).
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < _SEEDS:
        raise ConfigError(f"seed={seed!r} is no seed; give a whole number, 0 or larger, below 2**63")
    forget_streams()
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % _OF_NUMPY)  # noqa: NPY002  the global one


def stream_of(seed: int, coordinate: Sequence[int]) -> int:
    """The seed of the stream at a coordinate; that of the first is the seed itself, as on one device."""
    if not any(coordinate):
        return seed
    text = f"{seed}/{'/'.join(map(str, coordinate))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) % _SEEDS


def part_at_first_forward(seed: int, coordinate: Sequence[int], sharing: Iterable[int]) -> None:
    """Let this rank go on from a stream of its own when a module with a placed parameter is first called.

    Args: sharing: the ranks at the same coordinate.
    """
    own = stream_of(seed, coordinate)

    def part(_: nn.Module) -> None:
        if own != seed:
            torch.manual_seed(own)

    at_first_forward(seed, part)
    _streams.coordinate, _streams.undivided = tuple(coordinate), seed
    _streams.sharing = frozenset(sharing)


def draw_apart(ranks: Iterable[int]) -> bool:
    """Are these ranks, of which this is one, in streams that a seed parts?

    Whether they have parted by now each rank knows for itself alone: one without rows has run no forward.
    """
    return bool(_streams.sharing) and not _streams.sharing.issuperset(ranks)


def undivided() -> int | None:
    """The seed whose one stream all ranks are still in, to part at the first forward; None: they are not."""
    seed = _streams.undivided if _waiting else None
    return seed if seed == torch.initial_seed() else None


def go_on_undivided(seed: int | None) -> None:
    """The generators are back where ranks were in one stream of a seed: they part as they would have.

    Nothing happens for None, or where this process was not seeded by a context.
    """
    if seed is not None and _streams.coordinate is not None:
        forget_waiting()
        part_at_first_forward(seed, _streams.coordinate, _streams.sharing)


def at_first_forward(seed: int | None, act: Callable[[nn.Module], object]) -> None:
    """Run `act` when a module with a placed parameter is first called, and never again.

    Weights are drawn before; dropout draws in it.

    Args: seed: act only if the generator still goes on from it: one that was seeded anew, or restored from a
        checkpoint, is in the state that is wanted. None: act in any case.
    """

    def begin(module: nn.Module) -> None:
        forget_waiting()
        if seed is None or torch.initial_seed() == seed:
            act(module)

    def first(module: nn.Module, _: Any) -> None:
        if any(isinstance(p, TorchDTensor) for p in module.parameters()):
            begin(module)

    _waiting.append((register_module_forward_pre_hook(first), begin))


def part_now(module: nn.Module) -> None:
    """What waits for a first forward does not wait for it: this module is about to run."""
    for _, begin in tuple(_waiting):
        begin(module)


def forget_waiting() -> None:
    """Nothing waits for a first forward any more."""
    _streams.undivided = None
    while _waiting:
        _waiting.pop()[0].remove()


def forget_streams() -> None:
    """No seed parts any streams, until the next one."""
    forget_waiting()
    _streams.coordinate, _streams.sharing = None, frozenset()


def check_dropout(dropout: str, stages: int) -> None:
    """Raise ConfigError for a way to draw masks that is none, or has no meaning here."""
    if dropout not in ("own", "logical"):
        raise ConfigError(f"seed: dropout={dropout!r}; there are 'own' and 'logical'")
    if dropout == "logical" and stages > 1:
        raise ConfigError(
            f"seed: dropout='logical' over {stages} stages of a pipeline: each draws its own masks, and none "
            "knows how many keys the others have taken\n  fix: dropout='own'"
        )


def refuse_own_masks(module: nn.Module) -> None:
    """Raise ParallelError for a placed module whose masks nobody draws by logical index."""
    if not any(hasattr(child, LOGICAL) for child in module.modules()):
        raise ParallelError(
            f"context.seed(..., dropout='logical'): nothing draws the masks of {type(module).__name__} by "
            "logical index: all ranks would draw the same for other rows\n"
            '  fix: logical_dropout(module, context.mesh_for("batch")["dp"]), which parallelize(module, '
            "context, plan) does"
        )

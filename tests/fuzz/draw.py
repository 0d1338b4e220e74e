"""Random programs: a mesh, a type, some leaves, then families of steps until there are enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

import torch

from tests.fuzz.families import control, functions, indexing, layers, networks, pointwise, reductions, views
from tests.fuzz.program import Program
from tests.fuzz.scope import Ends, Nope, Scope

MESHES = ((2,), (3,), (4,), (2, 2), (2, 2, 1))
_DTYPES = {
    torch.float64: 52, torch.float32: 10, torch.bfloat16: 7, torch.float16: 4, torch.int64: 6, torch.int32: 2,
    torch.uint8: 3, torch.int8: 1, torch.bool: 3, torch.complex128: 8, torch.complex64: 2,
}  # fmt: skip
_SIZES = (1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8)
FAMILIES: dict[Callable[[Scope], object], float] = {
    views.views: 16, pointwise.unary: 9, pointwise.activation: 2, pointwise.binary: 12, pointwise.compare: 2,
    pointwise.ternary: 5, pointwise.lists: 6, pointwise.power: 1, pointwise.casts: 3, pointwise.likes: 2,
    reductions.reduction: 8, reductions.scan: 3, reductions.order: 3, reductions.product: 7,
    networks.softmax: 2.5, networks.loss: 4, networks.norm: 2, networks.attention: 2, networks.lookup: 1.5,
    networks.spatial: 2, networks.dropout_free: 1, networks.masked: 2, indexing.read: 6, indexing.write: 14,
    indexing.join: 4, indexing.rearrange: 3, control.hook: 2, control.host: 3, control.move: 2,
    control.gradient: 2.5, control.backward: 1, control.step_of_descent: 1, control.read_gradient: 0.5,
    control.needs_grad: 0.3, functions.special: 2, functions.spectral: 1, functions.linear_algebra: 2,
    functions.statistics: 3, functions.complex_numbers: 1, functions.written_parts: 2, functions.parts: 3,
    layers.convolution: 1, layers.pool: 1.5, layers.cell: 0.7, layers.more_norms: 1, layers.more_losses: 1,
    layers.more_activations: 1,
}  # fmt: skip
_TRIES = 60


def draw(
    seed: int,
    mesh: tuple[int, ...],
    families: Mapping[Callable[[Scope], object], float] | None = None,
    dtype: torch.dtype | None = None,
) -> Program:
    """The program of a seed on a mesh.

    Args:
        families: what it consists of, with weights; by default everything.
        dtype: of most leaves; by default drawn.
    """
    rng = Random(f"{seed} {mesh}")
    dtype = dtype or rng.choices(list(_DTYPES), list(_DTYPES.values()))[0]
    values = rng.choices(
        ("normal", "positive", "quarters", "bytes"), (6, 2, 2, 0.5 if _is_integer(dtype) else 0)
    )[0]
    s = Scope(rng.randrange(1 << 30), mesh, dtype, values)
    s.seed = seed
    wanted = rng.randint(3, 12)
    try:
        _leaves(s)
        _fill(s, wanted, families or FAMILIES)
        if len(s.steps) <= 12 and s.chance(0.75):
            s.attempt(control.backward)
    except Ends:
        pass
    return s.program()


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _leaves(s: Scope) -> None:
    for _ in range(s.rng.randint(1, 3)):
        dims = s.rng.choices((0, 1, 2, 3, 4), (0.5, 2, 5, 3, 1))[0]
        shape = tuple(s.rng.choice(_SIZES) for _ in range(dims))
        while torch.Size(shape).numel() > 240:
            shape = tuple(max(size // 2, 1) for size in shape)
        if shape and s.chance(0.03):
            shape = (*shape[:-1], 0)
        s.leaf(shape)


def _fill(s: Scope, wanted: int, choice: Mapping[Callable[[Scope], object], float]) -> None:
    families, weights = list(choice), list(choice.values())
    silent = 0
    for _ in range(_TRIES):
        if len(s.steps) >= wanted:
            return
        if silent:
            silent -= 1
        elif s.chance(0.06):
            silent = s.rng.randint(1, 4)
        s.grad_mode = not silent
        s.attempt(s.rng.choices(families, weights)[0])
    s.grad_mode = True


__all__ = ["Ends", "Nope", "draw"]

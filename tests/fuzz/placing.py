"""Leaves of a program: their values, the placements that they may have, and how they are put on the ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw
from shardwright.layout.arrangement import OrderedPlacements
from shardwright.testing.rank_device import here
from tests.fuzz.program import Leaf
from tests.placement.user_placements import PermutedRows

_NAMES = {name: getattr(sw, name) for name in (
    "Shard", "Replicate", "Interleaved", "Ragged", "Owner", "ZigZag", "BlockCyclic", "Partial"
)} | {"PermutedRows": PermutedRows}  # fmt: skip


@functools.cache
def placement_of(text: str) -> sw.Placement:
    """The placement that a text names."""
    placement = eval(text, {"__builtins__": {}}, _NAMES)  # noqa: S307 - written by this package
    assert isinstance(placement, sw.Placement)
    return placement


def values_of(leaf: Leaf) -> torch.Tensor:
    """The whole value, the same wherever it is made.

    normal; positive: 0.5 to 2.5; quarters: multiples of 0.25, with ties; integers: -4 to 4; bytes: 0 to 255;
    index N: below N; permutation; bool; ones; eye.
    """
    g = torch.Generator(here()).manual_seed(leaf.seed)
    kind, _, rest = leaf.values.partition(" ")
    shape, dtype = leaf.shape, leaf.torch_dtype
    if kind == "ones":
        return torch.ones(shape, dtype=dtype)
    if kind == "eye":
        return torch.eye(*shape, dtype=dtype)
    if kind == "bool":
        return torch.rand(shape, generator=g) > 0.5
    if kind == "index":
        return torch.randint(0, max(int(rest), 1), shape, generator=g).to(dtype)
    if kind == "permutation":
        return torch.randperm(shape[0], generator=g).to(dtype)
    if kind == "integers":
        return torch.randint(0 if dtype == torch.uint8 else -4, 5, shape, generator=g).to(dtype)
    if kind == "bytes":
        return torch.randint(0, 256, shape, generator=g).to(torch.uint8).to(dtype)
    if kind == "quarters":
        return (torch.randint(-6, 7, shape, generator=g) / 4).to(dtype)
    if kind == "positive":
        return (torch.rand(shape, generator=g, dtype=torch.float64) * 2 + 0.5).to(dtype)
    assert kind == "normal", kind
    made = torch.randn(shape, generator=g, dtype=torch.float64)
    if dtype.is_complex:
        made = torch.complex(made, torch.randn(shape, generator=g, dtype=torch.float64))
    return made.to(dtype)


def draw_placement(rng: Random, shape: tuple[int, ...], dtype: torch.dtype, n: int, *, taken: bool) -> str:
    """A placement for one axis of size n.

    Args: taken: an earlier axis has one that may have flattened dims, or holds rows of its own choice.
    """
    kind = rng.choices(_KINDS, _WEIGHTS)[0]
    dims = len(shape)
    if kind == "pending":
        return f"Partial({rng.choice(_REDUCTIONS[_class_of(dtype)])!r})"
    if kind == "Replicate":
        return "Replicate()"
    if kind == "Owner" or not dims:
        return f"Owner({rng.randrange(n)})"
    dim = rng.randrange(dims)
    if kind == "Ragged":
        units = [rng.randrange(4) for _ in range(n)]
        units[rng.randrange(n)] += 1
        some = sorted(rng.sample(range(dims), rng.randint(1, dims))) if rng.random() < 0.4 else [dim]
        return f"Ragged({tuple(units)}, {tuple(some)})"
    if kind == "PermutedRows" and not taken:
        return f"PermutedRows({rng.randrange(3)})"
    if kind in {"Interleaved", "BlockCyclic"}:
        return f"{kind}({dim}, {rng.randint(1, 3)})"
    return f"{'ZigZag' if kind == 'ZigZag' else 'Shard'}({dim})"


REVERSED = "reversed"
_KINDS, _WEIGHTS = zip(
    *{
        "Shard": 6, "Replicate": 3, "pending": 4, "Interleaved": 1.5, "Ragged": 2, "Owner": 1, "ZigZag": 1,
        "BlockCyclic": 1, "PermutedRows": 1,
    }.items(), strict=True,
)  # fmt: skip
_REDUCTIONS = {
    "f": ("sum", "sum", "sum", "avg", "max", "min", "product"),
    "c": ("sum", "sum", "avg", "product"),
    "i": ("sum", "sum", "max", "min", "product", "bxor", "bor", "band"),
    "b": ("max", "min", "bor", "band", "bxor"),
}


def _class_of(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "c"
    return "f" if dtype.is_floating_point else "b" if dtype == torch.bool else "i"


def draw_placements(
    rng: Random, shape: tuple[int, ...], dtype: torch.dtype, mesh: tuple[int, ...]
) -> tuple[str, ...]:
    """One for each axis; "reversed" at the end: they are applied from the right."""
    found = [draw_placement(rng, shape, dtype, n, taken=axis > 0) for axis, n in enumerate(mesh)]
    if len(mesh) > 1 and rng.random() < 0.4:
        alike = rng.random() < 0.5 and found[0].startswith(("Shard", "Interleaved", "BlockCyclic", "ZigZag"))
        found = [found[0]] * len(mesh) if alike else found
        found += [REVERSED] if "PermutedRows" not in str(found) else []
    return tuple(found)


def turned(texts: tuple[str, ...]) -> tuple[str, ...]:
    """The same placements, applied the other way round."""
    if "PermutedRows" in str(texts):  # it is the first, or has no meaning
        return texts
    return texts[:-1] if texts[-1] == REVERSED else (*texts, REVERSED)


def placements_of(texts: Sequence[str], mesh: DeviceMesh) -> OrderedPlacements:
    """What `draw_placements` drew."""
    names, placed = mesh.mesh_dim_names or (), [text for text in texts if text != REVERSED]
    order = names[::-1] if len(placed) < len(texts) else names
    return OrderedPlacements([placement_of(text) for text in placed], order)


def place(leaf: Leaf, mesh: DeviceMesh) -> sw.DTensor:
    """The leaf on the ranks: a pending one holds terms unlike the value, which combine to it exactly."""
    x = values_of(leaf)
    wanted = placements_of(leaf.placements, mesh)
    cut = OrderedPlacements((sw.Replicate() if p.is_pending else p for p in wanted), wanted.order)
    made = sw.distribute_tensor(x, mesh, cut, src_data_rank=None)
    if any(p.is_pending for p in wanted):
        local = made.to_local()
        for axis in map((mesh.mesh_dim_names or ()).index, wanted.order or ()):
            p = wanted[axis]
            if p.is_pending:
                local = term(p.reduce_op, local, mesh.size(axis), mesh.get_local_rank(axis))
        made = sw.DTensor.from_local(local, mesh, wanted, shape=x.shape, stride=x.stride())
    return made.detach().requires_grad_(leaf.grad)


def term(op: str, x: torch.Tensor, n: int, coord: int) -> torch.Tensor:
    """What a coord holds of a pending value; integers wrap where the dtype does."""
    return TERMS[op](x, n, coord) if n > 1 else x.clone()


def _sum(x: torch.Tensor, n: int, coord: int) -> torch.Tensor:
    if not (x.is_floating_point() or x.is_complex()):
        far = torch.full_like(x, 77)
        return (x + far, torch.zeros_like(x) - far)[coord] if coord < 2 else torch.zeros_like(x)
    return (x + x, -x)[coord] if coord < 2 else torch.zeros_like(x)


def _avg(x: torch.Tensor, n: int, coord: int) -> torch.Tensor:
    return (x * 2, x * (n - 2))[coord] if coord < 2 else torch.zeros_like(x)


def _extreme(x: torch.Tensor, n: int, coord: int, sign: int) -> torch.Tensor:
    """Each element is the extreme on one coord only."""
    holder = torch.arange(x.numel()).reshape(x.shape) % n == coord
    if x.dtype == torch.bool:
        return torch.where(holder, x, torch.tensor(sign < 0))
    other = x - sign
    if not x.is_floating_point():  # at the end of its range it is as extreme as it gets
        other = torch.where((other < x) if sign > 0 else (other > x), other, x)
    return torch.where(holder, x, other)


def _product(x: torch.Tensor, n: int, coord: int) -> torch.Tensor:
    if x.is_floating_point() or x.is_complex():
        return x * 2 if coord == 0 else torch.full_like(x, 0.5 if coord == 1 else 1)
    return x.clone() if coord == 0 else torch.ones_like(x)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(x) if x.dtype == torch.bool else torch.full_like(x, 5)


def _bxor(x: torch.Tensor, n: int, coord: int) -> torch.Tensor:
    return (x ^ _bits(x), _bits(x))[coord] if coord < 2 else torch.zeros_like(x)


def _bor(x: torch.Tensor, n: int, coord: int) -> torch.Tensor:
    return (x & _bits(x), x & ~_bits(x))[coord] if coord < 2 else torch.zeros_like(x)


def _band(x: torch.Tensor, n: int, coord: int) -> torch.Tensor:
    return (x | _bits(x), x | ~_bits(x))[coord] if coord < 2 else x.clone()


TERMS: dict[str, Any] = {
    "sum": _sum,
    "avg": _avg,
    "max": functools.partial(_extreme, sign=1),
    "min": functools.partial(_extreme, sign=-1),
    "product": _product,
    "bxor": _bxor,
    "bor": _bor,
    "band": _band,
}

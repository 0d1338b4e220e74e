"""The laws of pendings and of every placement: each a function that returns None or says what is broken.

They know no placement by name. Those of partitions are in `shardwright.placement.partition_laws`.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from math import prod

import torch
from torch import Tensor

from shardwright.index.region import Shape
from shardwright.placement.base import Pending, Placement

# -------------------------------------------------------------------------------------------- pendings


def samples(p: Pending, shape: Shape) -> Iterator[Tensor]:
    """Values of this shape in the domain of a Pending: floats, integers (of both signs, of one), bools."""
    random = torch.Generator().manual_seed(prod(shape))
    x = torch.randn(shape, generator=random)
    whole = (x * 8).long()
    for value in (x, x.abs(), x.double(), x.bfloat16(), whole, whole.abs(), x > 0, torch.complex(x, x)):
        if p.in_domain(value):
            yield value


def combine_undoes_embed(p: Pending, shape: Shape, n: int) -> str | None:
    """`combine([embed(x, n, c) for c in range(n)]) == x` within `tolerance`, and `x` stays as it was."""
    for x in samples(p, shape):
        before = x.clone()
        terms = [p.embed(x, n, coord) for coord in range(n)]
        for coord, term in enumerate(terms):
            if term.shape != x.shape or term.dtype != x.dtype:
                return f"embed() of coord {coord} made {_kind(term)} of {_kind(x)}"
        value = p.combine(terms)
        if value.shape != x.shape or value.dtype != x.dtype:
            return f"combine() made {_kind(value)} of terms of {_kind(x)}"
        if not torch.equal(x, before):
            return "combine() or embed() changed its argument"
        if not close(value, x, p.tolerance):
            shown = "\n".join(f"  coord {c} holds {term.tolist()}" for c, term in enumerate(terms))
            return f"combine(embed(x)) is {value.tolist()}, x is {x.tolist()} ({x.dtype})\n{shown}"
    return None


def combine_is_elementwise(p: Pending, shape: Shape, n: int) -> str | None:
    """Reducing a part is the part of the reduced: what lets a Pending stand beside any Partition."""
    for x in samples(p, shape):
        terms = [p.embed(x, n, coord) for coord in range(n)]
        whole = p.combine(terms).reshape(-1)[::2]
        part = p.combine([term.reshape(-1)[::2] for term in terms])
        if not torch.equal(whole, part):
            return f"combine() of every other element is {part.tolist()}, of all elements {whole.tolist()}"
    return None


def identity_is_ignored(p: Pending, shape: Shape, n: int) -> str | None:  # noqa: ARG001 - two terms suffice
    """`combine([x, identity(x)]) == x`; a linear reduction has the identity 0."""
    for x in samples(p, shape):
        neutral = p.identity(x)
        if neutral is None:
            continue
        ignored = not neutral.any() if p.linear else close(p.combine([x, neutral]), x, p.tolerance)
        if not ignored:
            return f"identity(x) is {neutral.tolist()}: combine() does not ignore it beside {x.tolist()}"
    return None


def linear_means_linear(p: Pending, shape: Shape, n: int) -> str | None:
    """Where `linear` is said, `combine` of a sum is the sum, and of a multiple the multiple."""
    if not p.linear:
        return None
    random = torch.Generator().manual_seed(0)
    first = [torch.randn(shape, generator=random, dtype=torch.float64) for _ in range(n)]
    second = [torch.randn(shape, generator=random, dtype=torch.float64) for _ in range(n)]
    both = p.combine([3 * a - b for a, b in zip(first, second, strict=True)])
    wanted = 3 * p.combine(first) - p.combine(second)
    if not torch.allclose(both, wanted, rtol=1e-12, atol=1e-12):
        return f"combine() is not linear: {both.tolist()} for 3a - b, term by term {wanted.tolist()}"
    return None


def close(value: Tensor, x: Tensor, ulps: int) -> bool:
    """Equal up to this many units in the last place; the sign of zero does not count."""
    if not ulps or not (x.is_floating_point() or x.is_complex()):
        return torch.equal(value, x)
    if x.is_complex():
        value, x = torch.view_as_real(value), torch.view_as_real(x)
    unit = torch.finfo(x.dtype).eps * x.double().abs()
    return bool(((value.double() - x.double()).abs() <= ulps * unit).all())


def _kind(x: Tensor) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}"


PENDING_LAWS: tuple[Callable[[Pending, Shape, int], str | None], ...] = (
    combine_undoes_embed,
    combine_is_elementwise,
    identity_is_ignored,
    linear_means_linear,
)

# ------------------------------------------------------------------------------------------- every one


def is_a_value(p: Placement) -> str | None:
    """Frozen, hashable, equal to its copies, pickled by import, with a gradient's placement."""
    if type(p).__hash__ is None:
        return f"{type(p).__name__} cannot be hashed: declare it with @dataclass(frozen=True)"
    copies = {"its deep copy": copy.deepcopy(p)}
    if "<locals>" not in type(p).__qualname__:  # a class inside a function cannot be imported by anybody
        copies["its pickle"] = pickle.loads(pickle.dumps(p))
    for words, made in copies.items():
        if made != p or hash(made) != hash(p) or repr(made) != repr(p):
            return f"{words} is {made!r}, which is not equal to {p!r}"
    if not isinstance(p.dual(), Placement):
        return f"dual() is {p.dual()!r}, not a Placement"
    families = [p.is_partition, p.is_pending, p.is_replicated]
    if sum(families) != 1:
        return "it must belong to one of the three families: subclass Partition or Pending"
    return None

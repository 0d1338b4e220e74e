"""Tensors that move together are what they are alone: lists of drawn tensors, on real ranks.

A list shares its messages. What each tensor is afterwards must not tell: neither by its values, nor by its
gradient, nor by memory that a neighbour's write reaches. The reference is the full tensor.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import MeshShape
from shardwright.placement import Flat, Partial, Placement, Replicate, Shard, Together
from shardwright.plan.network import Network, set_network
from shardwright.tensor.spec import spec_of
from shardwright.tensor.wrap import wrap
from shardwright.testing import RankPool, rank_mesh
from shardwright.testing.placement_laws import close
from tests.fuzz.placing import TERMS, term
from tests.generators import AXES
from tests.laws.draws import SHAPES, kinds, tolerance, value

# Meshes of the law, by the number of ranks that they take.
MESHES_OF = {2: ((2,),), 3: ((3,),), 4: ((2, 2), (4,)), 6: ((2, 3), (3, 2), (6,)), 8: ((2, 2, 2),)}
_DTYPES = (torch.float32,) * 4 + (torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool)


class BrokenListError(Exception):
    """A tensor that moved in a list is not what it is alone."""


@dataclass(frozen=True)
class Member:
    """One tensor of a list: its value, how it lies, and where it goes."""

    full: Tensor
    source: Layout
    target: Layout

    def __str__(self) -> str:
        return f"{self.source!r} -> {self.target!r}"


def draw_list(rng: random.Random, sizes: tuple[int, ...], to: tuple[int, ...] | None = None) -> list[Member]:
    """Two to six tensors; most of them lie alike and go the same way, as those of a model do.

    Args: to: the sizes of the mesh to which they go, if it is another.
    """
    mesh, home = _mesh_shape(sizes), _mesh_shape(to or sizes)
    shape, dtype = _shape(rng, prod(sizes)), rng.choice(_DTYPES)
    first = _member(rng, mesh, home, value(rng, shape, dtype))
    members = [first]
    for _ in range(rng.randint(1, 5)):
        shape = shape if rng.random() < 0.5 else _shape(rng, prod(sizes), len(shape))
        full = value(rng, shape, dtype if rng.random() < 0.85 else rng.choice(_DTYPES))
        full = torch.ones_like(full) if rng.random() < 0.1 else full  # then a part may be one place in memory
        alike = _alike(first, full) if rng.random() < 0.75 else None
        members.append(alike or _member(rng, mesh, home, full))
    return members


def _mesh_shape(sizes: tuple[int, ...]) -> MeshShape:
    return MeshShape(AXES[: len(sizes)], sizes)


def _shape(rng: random.Random, ranks: int, ndim: int | None = None) -> tuple[int, ...]:
    """Often one in which a rank holds a single element, or none."""
    few: list[tuple[int, ...]] = [
        (ranks,),
        (ranks, 1),
        (1, ranks),
        (ranks - 1,),
        (2 * ranks,),
        (2, ranks // 2),
    ]
    shapes = [*SHAPES, *few, *few]
    return rng.choice([s for s in shapes if ndim is None or len(s) == ndim] or shapes)


def _member(rng: random.Random, mesh: MeshShape, home: MeshShape, full: Tensor) -> Member:
    stride = _stride(rng, tuple(full.shape))
    if rng.random() < 0.3 and full.dim():
        return _gathered(rng, mesh, home, full, stride)
    return Member(full, _layout(rng, mesh, full, stride), _layout(rng, home, full, stride))


def _gathered(
    rng: random.Random, mesh: MeshShape, home: MeshShape, full: Tensor, stride: tuple[int, ...]
) -> Member:
    """What programs do most: the terms or the parts of one axis become the whole."""
    usual = [
        Shard(0),
        *(p for p in (Partial(), Partial(), Partial("avg"), Partial("max")) if p.in_domain(full)),
    ]
    source: list[Placement] = [Replicate() for _ in mesh.sizes]
    source[rng.randrange(len(source))] = rng.choice(usual)
    shape, dtype = tuple(full.shape), full.dtype
    whole = [Replicate() for _ in home.sizes]
    return Member(
        full,
        Layout(mesh, source, shape, dtype=dtype, stride=stride),
        Layout(home, whole, shape, dtype=dtype, stride=stride),
    )


def _layout(rng: random.Random, mesh: MeshShape, full: Tensor, stride: tuple[int, ...]) -> Layout:
    placements = [rng.choice(_kinds(rng, full, n)) for n in mesh.sizes]
    order = rng.sample(mesh.axes, len(mesh.axes))
    return Layout(mesh, placements, tuple(full.shape), dtype=full.dtype, stride=stride, order=order)


def _kinds(rng: random.Random, full: Tensor, n: int) -> list[Placement]:
    """Those that a tensor of a program can have: only plans within a graph put coords together."""
    drawn = [p for p in kinds(rng, full, n) if not isinstance(p, Together)]
    return [p for p in drawn if not (isinstance(p, Flat) and len(p.dims) == 1)]  # such a cut has a plain name


def _stride(rng: random.Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of memory in some order of the dims."""
    order = rng.sample(range(len(shape)), len(shape)) if rng.random() < 0.3 else list(range(len(shape)))
    return (
        torch.empty([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))]).stride()
    )


def _alike(first: Member, full: Tensor) -> Member | None:
    """Placed and sent as the first one, where that has a meaning for this tensor."""
    try:
        layouts = [_placed_as(layout, full) for layout in (first.source, first.target)]
    except sw.errors.ShardwrightError:
        return None
    return Member(full, *layouts)


def _placed_as(layout: Layout, full: Tensor) -> Layout:
    if not all(p.in_domain(full) for p in layout.placements if p.is_pending):
        raise sw.errors.LayoutError("not in the domain")
    return Layout(
        layout.mesh_shape, layout.placements, tuple(full.shape), dtype=full.dtype, order=layout.order_names
    )


# ---------------------------------------------------------------------------------------- on the ranks


def held(layout: Layout, full: Tensor, coords: tuple[int, ...]) -> Tensor:
    """What a rank holds; terms of a pending value are unlike it, and combine to it exactly."""
    for step in layout.applied:
        coord = step.coord(coords)
        op = getattr(step.pending, "reduce_op", None)
        full = term(op, full, step.size, coord) if op in TERMS else step.split(full, coord)
    return full


def placed(layout: Layout, full: Tensor, mesh: DeviceMesh, lies: str = "as it says") -> sw.DTensor:
    """A DTensor of this layout; its local tensor has an offset, gaps, or one place for many elements."""
    local = held(layout, full, tuple(mesh.get_coordinate())).clone()
    if lies == "with gaps":
        wide = local.new_zeros((*local.shape, 2))
        wide[..., 1] = local
        local = wide[..., 1]
    elif lies == "expanded" and local.numel() and bool((local == local.flatten()[0]).all()):
        local = local.flatten()[0].expand(local.shape)
    elif lies == "backwards":
        local = local.mT.contiguous().mT if local.dim() > 1 else local
    elif lies == "conjugate" and local.is_complex():
        local = local.conj().resolve_conj().conj()
    return wrap(local, spec_of(layout, mesh))


WRITTEN = ("as it says", "with gaps", "backwards")  # such memory can be written
LIES = (*WRITTEN, "expanded", "conjugate")


def moved_together(rng: random.Random, members: list[Member], mesh: DeviceMesh, home: DeviceMesh) -> None:
    """Values of the full tensors, bits of one by one, memory of its own, sources untouched."""
    given = [placed(m.source, m.full, mesh, rng.choice(LIES)) for m in members]
    before = [x._local_tensor.clone() for x in given]
    targets = [list(m.target.placements) for m in members]
    moved = [*sw.redistribute_many(given, home, targets)]
    alone = [x.redistribute(home, target) for x, target in zip(given, targets, strict=True)]
    for m, x, one, source, was in zip(members, moved, alone, given, before, strict=True):
        same(m, x.full_tensor(), "a list moved")
        if not m.source.pending_axes and not torch.equal(x._local_tensor, one._local_tensor):
            raise BrokenListError(f"{m}: {x._local_tensor} in a list, {one._local_tensor} alone")
        if not torch.equal(source._local_tensor, was):
            raise BrokenListError(f"{m}: the source was written")
    writes_reach_nobody_else(members, moved)


def writes_reach_nobody_else(members: list[Member], moved: list[sw.DTensor]) -> None:
    """A write into one result leaves the others, and their version counters, as they are."""
    for i, x in enumerate(moved):
        others = [y for y in moved if y is not x]
        was = [(y._local_tensor.clone(), y._local_tensor._version) for y in others]
        x._local_tensor.zero_()
        for y, (local, version) in zip(others, was, strict=True):
            if not torch.equal(y._local_tensor, local):
                raise BrokenListError(f"{members[i]}: a write into it reached {sw.layout_of(y)!r}")
            if y._local_tensor._version != version:
                raise BrokenListError(f"{members[i]}: a write into it counts for {sw.layout_of(y)!r}")


def gradients_together(rng: random.Random, members: list[Member], mesh: DeviceMesh, home: DeviceMesh) -> None:
    """Of `sum(weight * moved)` each tensor has the weight as its gradient."""
    members = [m for m in members if m.full.dtype.is_floating_point and _linear(m)]
    if not members:
        return
    given = [placed(m.source, m.full, mesh, rng.choice(LIES)).requires_grad_() for m in members]
    moved = sw.redistribute_many(given, home, [list(m.target.placements) for m in members])
    weights = [m.full + i + 1 for i, m in enumerate(members)]
    used = [i for i in range(len(members)) if rng.random() < 0.9]
    if not used:
        return
    how = {i: _layout(rng, members[i].target.mesh_shape, weights[i], members[i].target.stride) for i in used}
    tangents = [placed(layout, weights[i], home) for i, layout in how.items()]
    torch.autograd.backward([moved[i] for i in used], tangents)
    for i, m in enumerate(members):
        if (given[i].grad is None) is not (i not in used):
            raise BrokenListError(f"{m}: a gradient, or none, where it was not wanted")
        if i in used:
            same(Member(weights[i], m.source, how[i]), given[i].grad.full_tensor(), "a gradient")


def _linear(m: Member) -> bool:
    return all(getattr(p, "reduce_op", "sum") == "sum" for p in (*m.source.placements, *m.target.placements))


def same(m: Member, found: Tensor, what: str) -> None:
    """Within what the placements declare."""
    wanted, ulps = m.full, tolerance(m.source, m.target)
    if found.shape != wanted.shape or found.dtype != wanted.dtype or not close(found, wanted, ulps):
        raise BrokenListError(f"{what}: {m}:\nthe value is {found}\nit must be {wanted} within {ulps} ulp")


def finished_together(rng: random.Random, members: list[Member], mesh: DeviceMesh, home: DeviceMesh) -> None:
    """A list that is read inside `spmd` finishes what is pending, all at once."""
    members = [m for m in members if m.full.dtype.is_floating_point]
    given = [placed(m.source, m.full, mesh, rng.choice(WRITTEN)) for m in members]
    if not given:
        return
    with sw.spmd(mesh, check=False):
        norms = torch._foreach_norm(given)
        doubled = torch._foreach_mul(given, given)
        torch._foreach_mul_(given, 2.0)
        torch._foreach_add_(given, doubled)
    for m, norm, x, y in zip(members, norms, doubled, given, strict=True):
        near(m, norm.full_tensor(), torch.linalg.vector_norm(m.full), "a norm")
        near(m, x.full_tensor(), m.full * m.full, "a square")
        near(m, y.full_tensor(), m.full * 2 + m.full * m.full, "written in place")


def near(m: Member, found: Tensor, wanted: Tensor, what: str) -> None:
    """Within rounding of a few operations."""
    eps = torch.finfo(wanted.dtype).eps
    torch.testing.assert_close(
        found,
        wanted,
        rtol=16 * eps,
        atol=16 * eps,
        msg=lambda text: f"{what}: {m}:\n{found}\n{wanted}\n{text}",
    )


def stepped_together(rng: random.Random, members: list[Member], mesh: DeviceMesh, home: DeviceMesh) -> None:
    """An optimizer's step is that of one device, wherever the backward left the gradients."""
    members = [m for m in members if m.full.dtype.is_floating_point and not m.source.pending_axes]
    if not members:
        return
    parameters = [torch.nn.Parameter(placed(m.source, m.full, mesh, rng.choice(WRITTEN))) for m in members]
    gradients = [m.full + i + 1 for i, m in enumerate(members)]
    for p, m, g in zip(parameters, members, gradients, strict=True):
        here = m.target if m.target.mesh_shape == m.source.mesh_shape else m.source
        p.grad = placed(here, g, mesh, rng.choice(LIES))
    lists = rng.choice([True, False])
    torch.optim.SGD(parameters, lr=0.5, momentum=0.5, foreach=lists).step()
    for p, m, g in zip(parameters, members, gradients, strict=True):
        near(m, p.full_tensor(), m.full - 0.5 * g, "a step")
        near(m, p.grad.full_tensor(), g, "its gradient after it")


CHECKS: tuple[Callable[..., None], ...] = (
    moved_together,
    gradients_together,
    finished_together,
    stepped_together,
)


def try_lists(sizes: tuple[int, ...], seed: int, count: int) -> Counter[str]:
    """Runs on every rank of a world: so many lists; how often each check was made.

    Every second list moves as large tensors do: no bytes are few, so that terms go in two rounds, or by the
    backend's reduction. Every fifth goes to another mesh of these ranks, where there is one.
    Raises: BrokenListError, AssertionError: at the first list that is not what its members are.
    """
    tally: Counter[str] = Counter()
    for number in range(count):
        rng = random.Random(f"{seed} {number} {sizes}")
        to = rng.choice(MESHES_OF[prod(sizes)]) if rng.random() < 0.2 else sizes
        mesh, home = (rank_mesh(s, AXES[: len(s)]) for s in (sizes, to))
        members = draw_list(rng, sizes, to)
        set_network(Network(one_round_bytes=0 if number % 2 else None))
        try:
            for check in CHECKS:
                check(rng, members, mesh, home)
                tally[check.__name__] += 1
        except Exception as error:
            scene = f"list {number} of seed {seed} on {sizes} -> {to}, {check.__name__}"
            raise BrokenListError(f"{scene}: {type(error).__name__}: {error}") from error
        finally:
            set_network(Network())
    return tally


AT_ONCE = 20


def lists(pool: RankPool, seed: int, count: int) -> Iterator[Counter[str]]:
    """So many lists on the meshes of the law in turn; one report for some of them.

    Raises: RankError: a list that is broken, or a rank that raised; `RankTimeoutError`: a rank that waits.
    """
    meshes = [(world, sizes) for world, of_world in MESHES_OF.items() for sizes in of_world]
    for turn in range(-(-count // AT_ONCE)):
        world, sizes = meshes[turn % len(meshes)]
        yield pool.run(
            world, try_lists, sizes, seed + turn, min(AT_ONCE, count - turn * AT_ONCE), timeout=600
        )[0]

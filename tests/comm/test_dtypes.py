"""Every dtype through every kind of step, beside plain torch on the full tensor."""

import functools

import pytest
import torch

from shardwright.comm.execute import execute
from shardwright.errors import PlanError
from shardwright.layout import MeshShape
from shardwright.layout.layout import Layout
from shardwright.placement import Interleaved, Owner, Partial, Ragged, Replicate, Shard, ZigZag
from shardwright.plan import plan_redistribution
from shardwright.testing import rank_mesh

from .test_execute import thresholds

R, S0, S1 = Replicate(), Shard(0), Shard(1)
SHAPE = (9, 6)

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
MOVED = (*FLOATS, *EIGHT_BITS, *COMPLEX, *INTEGERS, torch.bool, torch.uint16, torch.uint32, torch.uint64)

# What plain torch makes of the ranks' terms, computed in a dtype that holds every intermediate value.
COMBINED = {
    "sum": lambda terms: terms.sum(0),
    "avg": lambda terms: terms.sum(0) / terms.shape[0],
    "product": lambda terms: terms.prod(0),
    "max": lambda terms: terms.amax(0),
    "min": lambda terms: terms.amin(0),
    "norm2": lambda terms: terms.square().sum(0).sqrt(),
    "band": lambda terms: functools.reduce(torch.bitwise_and, terms),
    "bor": lambda terms: functools.reduce(torch.bitwise_or, terms),
    "bxor": lambda terms: functools.reduce(torch.bitwise_xor, terms),
}
REDUCED = {
    "sum": (*FLOATS, *EIGHT_BITS, *COMPLEX, *INTEGERS),
    "avg": (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    "product": (torch.float64, torch.float16, torch.float8_e5m2, *COMPLEX, torch.int16),
    "max": (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int16, torch.bool),
    "min": (torch.float32, torch.uint8),
    "norm2": (torch.float64, torch.bfloat16),
    "band": (torch.int16, torch.bool),
    "bor": (torch.int64, torch.bool),
    "bxor": (torch.int16,),
}
# Two thresholds: one round, or two and the native all-reduce; messages, or collectives.
WAYS = ((0, 0), (0, 2**40), (2**40, 2**40))


def values(dtype: torch.dtype, seed: int, *, small: bool = False) -> torch.Tensor:
    """Integers that every dtype holds, sums of four of them too."""
    x = torch.arange(SHAPE[0] * SHAPE[1]).view(SHAPE)
    x = (x * (seed + 3) + seed) % 3 if small else (x * (seed + 5) + seed) % 4
    if dtype.is_complex:
        return torch.complex(x.double(), ((x + seed) % 2).double()).to(dtype)
    return x.to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


def moved() -> None:
    pairs = [
        ((4,), ([S0], [R])),
        ((4,), ([S1], [S0])),
        ((4,), ([R], [S1])),
        ((4,), ([Ragged((3, 0, 1, 2))], [ZigZag(0)])),
        ((4,), ([Owner(2)], [Interleaved(0, 2)])),
        ((2, 2), ([S0, S1], [S1, S0])),
        ((2, 2), ([S0, R], [R, R])),
    ]
    for dtype in MOVED:
        full = values(dtype, 1)
        for straight in (0, 2**40):
            with thresholds(0, straight):
                for sizes, placements in pairs:
                    check_move(full, sizes, placements)


def mesh_of(sizes: tuple[int, ...]):
    return rank_mesh(sizes, tuple(f"a{i}" for i in range(len(sizes))))


def check_move(full, sizes, placements) -> None:
    mesh = mesh_of(sizes)
    coords = tuple(mesh.get_coordinate())
    source, target = (Layout(mesh, p, full.shape, dtype=full.dtype) for p in placements)
    whole = plan_redistribution(source, target)
    plans = [whole]
    if target.placements[-1] == S0:
        plans.append(plan_redistribution(source, target, max_extra_bytes=whole.peak_bytes - 1))
    for plan in plans:
        result = execute(plan, source.split(full, coords), mesh)
        assert same_bits(result, target.split(full, coords)), f"{full.dtype} {plan}"


def test_every_dtype_moves_bit_for_bit_by_every_kind_of_step(ranks):
    ranks(4, moved, timeout=120)


def reduced(*, every: bool) -> None:
    """The first dtype of each op in every way, the others in one: a way sends bytes, a kernel adds them."""
    for op, dtypes in REDUCED.items():
        for at, dtype in enumerate(dtypes):
            for one_round, straight in WAYS if every or not at else WAYS[at % 3 :][:1]:
                with thresholds(one_round, straight):
                    check_reductions(op, dtype)


def check_reductions(op: str, dtype: torch.dtype) -> None:
    terms = [values(dtype, seed, small=op == "product") for seed in range(4)]
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else dtype
    p = Partial(op)
    for sizes, before, targets in (
        ((4,), [p], ([R], [S1])),
        ((2, 2), [p, p], ([R, R], [S1, S0])),
        ((2, 2), [p, R], ([R, S1],)),
    ):
        mesh = mesh_of(sizes)
        coords = tuple(mesh.get_coordinate())
        source = Layout(mesh, before, SHAPE, dtype=dtype)
        ours = terms[coords[0]] if before[-1] is R else terms[mesh.get_rank()]
        whole = torch.stack([t.to(wide) for t in (terms[:2] if before[-1] is R else terms)])
        expected = COMBINED[op](whole)
        for after in targets:
            target = source.with_placements(after)
            plan = plan_redistribution(source, target)
            result = execute(plan, ours.clone(), mesh)
            wanted = target.split(expected.to(dtype), coords)
            assert result.dtype == dtype
            tolerance = torch.finfo(dtype).eps if op == "norm2" else 0
            error = (result.to(wide) - wanted.to(wide)).abs().max() if wanted.numel() and tolerance else 0
            same = torch.equal(result.to(wide), wanted.to(wide))
            assert (error <= 4 * tolerance) if tolerance else same, f"{op} {dtype} {plan}"


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_reduction_of_every_dtype_is_that_of_plain_torch(ranks, every):
    ranks(4, reduced, every=every, timeout=120)


def not_a_number() -> None:
    mesh = mesh_of((4,))
    coords = tuple(mesh.get_coordinate())
    for dtype in FLOATS:
        for op in ("max", "min"):
            local = torch.full((6, 4), float(coords[0]), dtype=dtype)
            local[coords[0], 1] = float("nan")
            for one_round, straight in WAYS:
                with thresholds(one_round, straight):
                    source = Layout(mesh, [Partial(op)], (6, 4), dtype=dtype)
                    result = execute(
                        plan_redistribution(source, source.with_placements([R])), local.clone(), mesh
                    )
                assert result[:4, 1].isnan().all()
                assert result.isnan().sum() == 4


def test_nan_wins_a_maximum_and_a_minimum(ranks):
    ranks(4, not_a_number)


def accumulated() -> None:
    """1 + 4 * 2**-9 in bfloat16: added one by one in bfloat16 the small terms are lost."""
    mesh = mesh_of((4,))
    rank = mesh.get_local_rank()
    local = torch.full((8, 4), 1.0 if rank == 0 else 2**-9 * 4 / 3, dtype=torch.bfloat16)
    expected = (1 + 3 * local.new_full((), 2**-9 * 4 / 3).float()).to(torch.bfloat16)
    for straight in (0, 2**40):
        with thresholds(0, straight):
            source = Layout(mesh, [Partial()], (8, 4), dtype=torch.bfloat16)
            result = execute(plan_redistribution(source, source.with_placements([S0])), local, mesh)
        assert torch.equal(result, expected.expand(2, 4)), result


def test_half_types_are_summed_in_float32(ranks):
    ranks(4, accumulated)


def lazily_conjugated() -> None:
    mesh = mesh_of((4,))
    coords = tuple(mesh.get_coordinate())
    for dtype in COMPLEX:
        full = values(dtype, 2).conj()
        assert full.is_conj()
        for straight in (0, 2**40):
            with thresholds(0, straight):
                for after in ([S1], [R]):
                    source = Layout(mesh, [S0], SHAPE, dtype=dtype)
                    target = source.with_placements(after)
                    result = execute(plan_redistribution(source, target), source.split(full, coords), mesh)
                    assert torch.equal(result, target.split(full, coords).resolve_conj())


def test_a_lazy_conjugate_moves_as_what_it_says(ranks):
    ranks(4, lazily_conjugated)


@pytest.mark.parametrize(
    ("op", "dtype"),
    [("avg", torch.int64), ("avg", torch.bool), ("max", torch.complex64), ("bor", torch.float32)],
)
def test_a_reduction_without_meaning_is_refused_when_it_is_planned(op, dtype):
    source = Layout(MeshShape(("a",), (4,)), [Partial(op)], (8, 4), dtype=dtype)
    with pytest.raises(PlanError, match=f"{op}.*no meaning"):
        plan_redistribution(source, source.with_placements([R]))

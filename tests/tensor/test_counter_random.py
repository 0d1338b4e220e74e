"""The counter-based generator: known answers, distributions, the same numbers in every layout and world."""

import math

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.errors import RuleError
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import MeshShape
from shardwright.tensor.random.logical_index import indices_of, interval_of
from shardwright.tensor.random.philox import blocks, philox
from shardwright.tensor.random.source import CounterSource

from .cases import full, mesh, whole

# Random123 1.14, tests/kat_vectors, the three lines of philox4x32 with 10 rounds.
_ONES, _PI = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((_ONES,) * 4, (_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (_PI, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN)
def test_the_generator_gives_the_published_answers(counter, key, wanted):
    made = philox(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(int(word) for word in made) == wanted


def test_blocks_count_in_the_lower_words():
    made = blocks(torch.tensor([5 + (3 << 32)]), (7, 9))
    counter = tuple(torch.tensor([word]) for word in (5, 3, 0, 0))
    assert [int(w) for w in made] == [int(w) for w in philox(counter, (7, 9))]


LAYOUTS = [
    ((4,), (sw.Shard(0),)),
    ((4,), (sw.Shard(1),)),
    ((3,), (sw.Interleaved(1, 2),)),
    ((2,), (sw.ZigZag(0),)),
    ((2,), (sw.Ragged((1, 3), dims=(0, 1)),)),
    ((3,), (sw.Owner(2),)),
    ((2, 2), (sw.Shard(1), sw.Shard(1))),
    ((2, 3), (sw.BlockCyclic(0, 2), sw.Ragged((2, 0, 3), dims=(1,)))),
]


@pytest.mark.parametrize(("sizes", "placements"), LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 7), (4, 8), (0, 3), (1, 9)])
def test_indices_are_those_of_the_flattened_tensor(sizes, placements, shape):
    grid = MeshShape(tuple("ab")[: len(sizes)], sizes)
    layout = Layout(grid, placements, shape, dtype=torch.float32)
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    for rank in grid.ranks:
        coords = grid.coords_of(rank)
        wanted = layout.split(numbers, coords).reshape(-1)
        assert torch.equal(indices_of(layout, coords, torch.device("cpu")), wanted)
        interval = interval_of(layout, coords)
        if interval is not None:
            assert wanted.tolist() == list(range(interval[0], sum(interval)))[: len(wanted)]


def _source(key=11, shape=(60_000,)):
    layout = Layout(MeshShape(("a",), (1,)), (sw.Replicate(),), shape, dtype=torch.float32)
    return CounterSource(key, layout, (0,), torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_numbers_follow_their_distributions(dtype):
    """Kolmogorov-Smirnov at 1e-4, moments within five standard errors; the seeds are fixed."""
    from scipy import stats  # half a second, which ranks that import this module need not pay

    source = _source()
    uniform = source.uniform(dtype).to(dtype)
    assert 0 <= uniform.min() < uniform.max() < 1
    normal = source.normal(dtype)
    if dtype.itemsize >= 4:
        assert stats.kstest(uniform.numpy(), "uniform").pvalue > 1e-4
        assert stats.kstest(normal.numpy(), "norm").pvalue > 1e-4
    n = normal.numel()
    assert abs(normal.mean()) < 5 / math.sqrt(n)
    assert abs(normal.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((normal**4).mean() - 3) < 5 * math.sqrt(96 / n)
    inside = source.inside(dtype)
    assert 0 < inside.min() < inside.max() < 1
    counts = torch.bincount(source.integers(-3, 10) + 3, minlength=10)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4
    assert abs(source.below(0.3).double().mean() - 0.3) < 5 * math.sqrt(0.21 / n)
    wide = source.integers(0, 3 << 60).double() / (3 << 60)
    assert stats.kstest(wide.numpy(), "uniform").pvalue > 1e-4


def test_neighbours_and_keys_are_uncorrelated():
    """Within a tensor at small lags, between the parts of ranks, and between the keys of consecutive ops."""
    n = 60_000
    normal = _source().normal(torch.float64)
    parts = [(normal[:-lag], normal[lag:]) for lag in (1, 2, 3, 4, 8, n // 2)]
    parts += [(normal, _source(key).normal(torch.float64)) for key in (12, 11 + (1 << 32), 11 ^ 1)]
    for left, right in parts:
        correlation = torch.corrcoef(torch.stack([left, right]))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(len(left))


DRAWS = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randn_like in double": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, 3, 90),
    "uniform_": lambda x: (x * 0).uniform_(-3, 3),
    "normal_": lambda x: (x * 0).normal_(1.0, 2.0),
    "exponential_": lambda x: (x * 0).exponential_(2.0),
    "geometric_": lambda x: (x * 0).geometric_(0.3),
    "cauchy_": lambda x: (x * 0).cauchy_(),
    "log_normal_": lambda x: (x * 0).log_normal_(),
    "random_": lambda x: (x * 0).random_(),
    "random_ from to": lambda x: (x * 0).random_(-5, 50),
    "random_ of integers": lambda x: (x * 0).to(torch.int64).random_(),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli with p": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli_ of a tensor": lambda x: (x * 0).bernoulli_(x.sigmoid()),
    "normal of tensors": lambda x: torch.normal(x, x.abs()),
    "dropout": lambda x: functional.dropout(x, 0.4),
    "rrelu": lambda x: functional.rrelu(x, 0.0, 3.0, training=True),
    "rrelu_": lambda x: functional.rrelu_(x * 1, 0.0, 3.0, training=True),
    "native dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "gumbel softmax": lambda x: functional.gumbel_softmax(x, 0.7),
    "rand": lambda x: sw.rand(5, 7, device_mesh=x.device_mesh, placements=x.placements),
    "randn": lambda x: sw.randn(5, 7, device_mesh=x.device_mesh, placements=x.placements),
    "trunc_normal_": lambda x: torch.nn.init.trunc_normal_(x * 0),
    "a generator": lambda x: (x * 0).normal_(generator=torch.Generator().manual_seed(3)),
    # drawn in full: not covered, and so equal to one device
    "multinomial": lambda x: torch.multinomial(x.abs() + 0.1, 2),
    "poisson": lambda x: torch.poisson(x.abs() * 4),
}


def _values(name, layout):
    d = sw.distribute_tensor(full(5, 7), mesh(), layout)
    torch.manual_seed(8)
    with sw.random_mode("counter"):
        made = DRAWS[name](d)
    return whole(made), torch.rand(1)


def _same(value, other, name):
    """Bit for bit; only what a softmax makes of the numbers is rounded in the order of the parts."""
    return torch.allclose(value, other, rtol=1e-6) if name == "gumbel softmax" else torch.equal(value, other)


def _all_values():
    """Per op the one value that every layout of this world gives."""
    layouts = [(sw.Replicate(), sw.Shard(1)), (sw.Shard(1), sw.Shard(0)), (sw.Ragged((3, 1)), sw.Owner(0))]
    if mesh().ndim == 1:
        layouts = [(p,) for p in (sw.Replicate(), sw.Shard(1), sw.Interleaved(1, 2), sw.Owner(0))]
    found = {}
    for name in DRAWS:
        value, after = _values(name, layouts[0])
        for layout in layouts[1:]:
            again, went_on = _values(name, layout)
            assert _same(again, value, name), f"{name} {layout}"
            assert torch.equal(went_on, after), f"{name} {layout}: the generator"
        found[name] = value
    return found


def test_the_numbers_are_the_same_in_every_layout_and_world(ranks):
    """Bit for bit, on 3 and on 2 x 2 ranks, whatever the placements; the generators stay in step."""
    worlds = [ranks(world, _all_values) for world in (3, 4)]
    for found in worlds:
        for of_rank in found:
            for name, value in of_rank.items():
                assert _same(value, worlds[0][0][name], name), name


def _steps_and_gradients():
    x = sw.distribute_tensor(full(5, 7), mesh(), [sw.Shard(1)])
    with sw.random_mode("counter"):
        torch.manual_seed(1)
        first, second = torch.randn_like(x).full_tensor(), torch.randn_like(x).full_tensor()
        assert not torch.equal(first, second)
        torch.manual_seed(1)
        assert torch.equal(torch.randn_like(x).full_tensor(), first)
        for reentrant in (False, True):
            grads = []
            for recompute in (False, True):
                leaf = x.detach().clone().requires_grad_()
                torch.manual_seed(1)
                step = lambda y: functional.dropout(y.sin(), 0.5)  # noqa: E731
                out = checkpoint(step, leaf, use_reentrant=reentrant) if recompute else step(leaf)
                (out**2).sum().backward()
                grads.append(leaf.grad.full_tensor())
            assert torch.equal(*grads)
        with sw.trace() as t:
            torch.poisson(x.abs())
            torch.randn_like(x)
        assert [d.op for d in t.decisions if "full draw" in d.reason] == ["aten::poisson"]
        with pytest.raises(RuntimeError, match="std >= 0"):
            torch.zeros_like(x).normal_(0, -1.0)
        with sw.random_mode("full"):
            torch.manual_seed(1)
            inner = torch.randn_like(x).full_tensor()
    torch.manual_seed(1)
    assert torch.equal(inner, torch.randn(5, 7))
    pending = sw.DTensor.from_local(torch.ones(3), mesh(), [sw.Partial()])
    with sw.random_mode("counter"), sw.trace() as t:
        torch.manual_seed(1)
        drawn = torch.rand_like(pending)
        torch.manual_seed(1)
        pending.uniform_()
    assert not t.collectives
    assert torch.equal(pending.full_tensor(), drawn.full_tensor())


def test_steps_differ_recomputation_repeats_and_uncovered_ops_are_recorded(ranks):
    ranks(2, _steps_and_gradients)


def test_an_unknown_mode_is_refused():
    with pytest.raises(RuleError, match="there are 'full'"):
        sw.random_mode("fast")

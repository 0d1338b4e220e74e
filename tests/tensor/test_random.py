"""Random numbers are those of one device with the same seed, whatever the placements and the world."""

import pytest
import torch
from torch import distributions, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.errors import RuleError
from tests.tiers import only

from .cases import close, full, layouts_of, mesh, place

FAMILY = (sw.Interleaved(1, 2), sw.Ragged((1, 3, 2)), sw.ZigZag(0), sw.Owner(1), sw.BlockCyclic(0, 2))


def _layouts(dims=2, *, pending=True):
    """The plain layouts of this world, and on one axis one of each other family; the last dim is uneven."""
    found = layouts_of(dims, pending=pending)
    if mesh().ndim > 1:
        return [*found, (sw.Ragged((1, 3)), sw.Interleaved(1, 2))]
    n = mesh().size()
    return [*found, *((p,) for p in FAMILY if not isinstance(p, sw.Ragged)), (sw.Ragged((0, 1, 2)[-n:]),)]


def _seeded(seed=3):
    return torch.Generator().manual_seed(seed)


# Draws of a float tensor of shape (5, 7).
DRAWS = {
    "dropout": lambda x: functional.dropout(x, 0.4),
    "dropout twice": lambda x: functional.dropout(functional.dropout(x, 0.4), 0.2),
    "dropout in place": lambda x: functional.dropout(x * 1, 0.4, inplace=True),
    "native dropout": lambda x: torch.native_dropout(x, 0.3, True),
    "dropout of channels": lambda x: functional.dropout2d(x.view(5, 7, 1, 1), 0.3),
    "alpha dropout": lambda x: functional.alpha_dropout(x, 0.3, training=True),
    "feature alpha dropout": lambda x: functional.feature_alpha_dropout(x.view(5, 7, 1), 0.3, training=True),
    "rand_like": lambda x: x * 0 + torch.rand_like(x),
    "randn_like": lambda x: x * 0 + torch.randn_like(x),
    "rand_like of another dtype": lambda x: torch.rand_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, 3, 90),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli with p": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli_": lambda x: (x * 0).bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda x: (x * 0).bernoulli_(x.sigmoid()),
    "normal_": lambda x: (x * 0).normal_(1.0, 2.0),
    "normal_ of a transposed": lambda x: (x.t() * 0).normal_(),
    "normal of tensors": lambda x: torch.normal(x, x.abs()),
    "normal of a tensor and a number": lambda x: torch.normal(x, 2.0),
    "normal of a number and a tensor": lambda x: torch.normal(1.0, x.abs()),
    "uniform_": lambda x: (x * 0).uniform_(-3, 3),
    "exponential_": lambda x: (x * 0).exponential_(2.0),
    "geometric_": lambda x: (x * 0).geometric_(0.3),
    "cauchy_": lambda x: (x * 0).cauchy_(),
    "log_normal_": lambda x: (x * 0).log_normal_(),
    "random_": lambda x: (x * 0).random_(),
    "random_ to": lambda x: (x * 0).random_(50),
    "random_ from to": lambda x: (x * 0).random_(-5, 50),
    "random_ of integers": lambda x: (x * 0).to(torch.int64).random_(),
    "poisson": lambda x: torch.poisson(x.abs() * 4),
    "binomial": lambda x: torch.binomial((x.abs() * 9).floor(), x.sigmoid()),
    "multinomial": lambda x: torch.multinomial(x.abs() + 0.1, 2),
    "multinomial with replacement": lambda x: torch.multinomial(x.abs() + 0.1, 9, replacement=True),
    "gamma": lambda x: torch._standard_gamma(x.abs() + 0.1),
    "dirichlet": lambda x: torch._sample_dirichlet(x.abs() + 0.1),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "gumbel softmax": lambda x: functional.gumbel_softmax(x, 0.7),
    "hard gumbel softmax": lambda x: functional.gumbel_softmax(x, 0.7, hard=True),
    "fractional max pool": lambda x: functional.fractional_max_pool2d(
        x.view(1, 1, 5, 7), 2, output_size=(3, 4)
    ),
    "a generator": lambda x: (
        (x * 0).normal_(generator=_seeded()) + torch.bernoulli(x.sigmoid(), generator=_seeded(4))
    ),
    "attention with dropout": lambda x: functional.scaled_dot_product_attention(
        x.view(1, 1, 5, 7), x.view(1, 1, 5, 7), x.view(1, 1, 5, 7), dropout_p=0.4
    ),
    "a sample of normals": lambda x: distributions.Normal(x, x.abs() + 1).rsample(),
    "a sample of classes": lambda x: distributions.Categorical(logits=x).sample(),
    "a sample of coins": lambda x: distributions.Bernoulli(logits=x).sample((2,)),
    "a sample of counts": lambda x: distributions.Poisson(x.abs() + 1).sample(),
    "a sample of gammas": lambda x: distributions.Gamma(x.abs() + 1, x.abs() + 1).rsample(),
    "a sample of betas": lambda x: distributions.Beta(x.abs() + 1, x.abs() + 1).sample(),
    "a sample of mixtures": lambda x: distributions.Dirichlet(x.abs() + 1).sample(),
    "a sample of waiting times": lambda x: distributions.Exponential(x.abs() + 1).rsample(),
    "a sample of uniforms": lambda x: distributions.Uniform(x, x + 1).rsample(),
    "a sample of laplaces": lambda x: distributions.Laplace(x, x.abs() + 1).rsample(),
    "a sample of multinomials": lambda x: distributions.Multinomial(5, logits=x).sample(),
}


# On two axes: one of each way to draw.
FEW = (
    "dropout",
    "native dropout",
    "rand_like",
    "bernoulli",
    "normal_ of a transposed",
    "normal of tensors",
    "multinomial",
    "rrelu",
    "a generator",
    "attention with dropout",
    "a sample of classes",
)


def _draws(names):
    x = full(5, 7)
    for name in names:
        function = DRAWS[name]
        torch.manual_seed(8)
        wanted = function(x)
        after = torch.rand(2)
        for layout in _layouts():
            d = place(x, layout)
            where = f"{name} {layout}"
            torch.manual_seed(8)
            with sw.spmd(mesh(), check=False):
                got = function(d)
            pairs = zip(got, wanted, strict=True) if isinstance(wanted, tuple) else [(got, wanted)]
            for g, w in pairs:
                close(g, w, where)
            assert torch.equal(torch.rand(2), after), f"{where}: the generator went on as on one device"


@pytest.mark.parametrize("world", only([4], [2, 4]))
def test_draws_are_those_of_one_device(ranks, world):
    ranks(world, _draws, list(DRAWS) if world == 2 else FEW)


GRADIENTS = {
    "dropout": lambda x: functional.dropout(x, 0.5),
    "recomputed dropout": lambda x: checkpoint(
        lambda y: functional.dropout(y.sin(), 0.5), x, use_reentrant=False
    ),
    "recomputed dropout, reentrant": lambda x: checkpoint(
        lambda y: functional.dropout(y.sin(), 0.5), x, use_reentrant=True
    ),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "a sample of gammas": lambda x: distributions.Gamma(x.abs() + 1, x.abs() + 1).rsample(),
}


def _gradients():
    x = full(5, 7)
    for name, function in GRADIENTS.items():
        plain = x.clone().requires_grad_()
        torch.manual_seed(8)
        (function(plain) ** 2).sum().backward()
        after = torch.rand(2)
        for layout in _layouts():
            d = place(x, layout, requires_grad=True)
            torch.manual_seed(8)
            with sw.spmd(mesh(), check=False):
                (function(d) ** 2).sum().backward()
            close(d.grad, plain.grad, f"{name} {layout}")
            assert torch.equal(torch.rand(2), after), f"{name} {layout}: the generator"


def test_gradients_use_the_numbers_of_the_forward(ranks):
    ranks(2, _gradients)


def _into_parts():
    """Uneven and empty parts, an out=, integers in place, a tensor without elements."""
    for shape in ((1, 7), (0, 7), (3,), ()):
        torch.manual_seed(8)
        wanted = torch.empty(shape).normal_()
        for placement in (
            (sw.Shard(0), sw.Owner(1), sw.Replicate()) if shape else (sw.Replicate(), sw.Owner(0))
        ):
            d = sw.zeros(*shape, device_mesh=mesh(), placements=[placement])
            torch.manual_seed(8)
            close(d.normal_(), wanted, f"{shape} {placement}")
    for function in (torch.bernoulli, lambda p, out: torch.normal(p, 2.0, out=out)):
        x, out = full(5, 7).sigmoid(), sw.zeros(5, 7, device_mesh=mesh(), placements=[sw.Shard(1)])
        torch.manual_seed(8)
        wanted = function(x, out=torch.empty(5, 7))
        torch.manual_seed(8)
        assert function(place(x, [sw.Shard(0)]), out=out) is out
        close(out, wanted)
    out = sw.zeros(9, dtype=torch.int64, device_mesh=mesh(), placements=[sw.Shard(0)])
    torch.manual_seed(8)
    wanted = torch.randperm(9)
    torch.manual_seed(8)
    close(torch.randperm(9, out=out), wanted)
    with pytest.raises(RuleError, match="give an out= of that shape"):
        torch.randperm(8, out=out)


def test_draws_go_into_uneven_and_empty_parts_and_into_out(ranks):
    ranks(2, _into_parts)


INITS = {
    "normal_": nn.init.normal_,
    "uniform_": nn.init.uniform_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "trunc_normal_": nn.init.trunc_normal_,
    "orthogonal_": nn.init.orthogonal_,
    "sparse_": lambda x: nn.init.sparse_(x, 0.4),
    "ones_": nn.init.ones_,
    "constant_": lambda x: nn.init.constant_(x, 3.0),
    "eye_": nn.init.eye_,
    "dirac_": lambda x: nn.init.dirac_(x.view(5, 7, 1)).view(5, 7),
}


def _initialises():
    for name, init in INITS.items():
        torch.manual_seed(2)
        wanted = init(torch.zeros(5, 7))
        for layout in layouts_of(2, pending=False):
            torch.manual_seed(2)
            placed = sw.zeros(5, 7, device_mesh=mesh(), placements=layout)
            with sw.spmd(mesh(), check=False):
                close(init(placed), wanted, f"{name} {layout}")


@pytest.mark.parametrize("world", only([2], [2, 4]))
def test_initialisers_are_those_of_one_device(ranks, world):
    ranks(world, _initialises)


def _naive():
    """Planted: each rank draws for its own part."""
    torch.manual_seed(8)
    wanted = functional.dropout(full(6, 7), 0.5)
    d = place(full(6, 7), [sw.Shard(0)])
    torch.manual_seed(8)
    local = functional.dropout(d.to_local(), 0.5)
    with pytest.raises(AssertionError):
        close(sw.DTensor.from_local(local, mesh(), [sw.Shard(0)]), wanted)


def test_masks_that_are_equal_on_all_ranks_go_red(ranks):
    ranks(2, _naive)

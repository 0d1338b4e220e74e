"""Random numbers are those of one device with the same seed, whatever the placements and the world."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwright as sw

from .cases import close, full, layouts_of, mesh, place

DRAWS = {
    "dropout": lambda x: functional.dropout(x, 0.4),
    "dropout twice": lambda x: functional.dropout(functional.dropout(x, 0.4), 0.2),
    "dropout2d": lambda x: functional.dropout(x.view(5, 7, 1, 1), 0.3),
    "alpha dropout": lambda x: functional.alpha_dropout(x, 0.3, training=True),
    "rand_like": lambda x: x * 0 + torch.rand_like(x),
    "randn_like": lambda x: x * 0 + torch.randn_like(x),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "normal_": lambda x: (x * 0).normal_(1.0, 2.0),
    "uniform_": lambda x: (x * 0).uniform_(-3, 3),
    "exponential_": lambda x: (x * 0).exponential_(),
    "multinomial": lambda x: torch.multinomial(x.abs() + 0.1, 2),
    "gumbel softmax": lambda x: functional.gumbel_softmax(x, 0.7),
}


def _draws(name):
    function = DRAWS[name]
    x = full(5, 7)
    torch.manual_seed(8)
    wanted = function(x)
    after = torch.rand(2)
    for layout in layouts_of(2):
        d = place(x, layout)
        torch.manual_seed(8)
        close(function(d), wanted, f"{layout}")
        assert torch.equal(torch.rand(2), after), f"{layout}: the generator went on as on one device"


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_those_of_one_device(ranks, name, world):
    ranks(world, _draws, name)


def _dropout_gradient():
    x = full(5, 7)
    plain = x.clone().requires_grad_()
    torch.manual_seed(8)
    (functional.dropout(plain, 0.5) ** 2).sum().backward()
    for layout in layouts_of(2):
        d = place(x, layout, requires_grad=True)
        torch.manual_seed(8)
        (functional.dropout(d, 0.5) ** 2).sum().backward()
        close(d.grad, plain.grad, f"{layout}")


def test_the_gradient_of_dropout_uses_the_same_mask(ranks):
    ranks(2, _dropout_gradient)


def _initialises():
    for init in (
        nn.init.normal_,
        nn.init.uniform_,
        nn.init.xavier_uniform_,
        nn.init.kaiming_normal_,
        nn.init.trunc_normal_,
        nn.init.ones_,
    ):
        torch.manual_seed(2)
        wanted = init(torch.empty(5, 7))
        for layout in layouts_of(2, pending=False):
            torch.manual_seed(2)
            close(
                init(sw.empty(5, 7, device_mesh=mesh(), placements=layout)),
                wanted,
                f"{init.__name__} {layout}",
            )


@pytest.mark.parametrize("world", [2, 4])
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

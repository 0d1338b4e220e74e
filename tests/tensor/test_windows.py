"""Convolutions and pooling along a cut dim: values and gradients of one device, bytes of the borders only."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwright as sw
from shardwright.errors import ImplicitRedistributionError
from shardwright.rules import windows as plans
from shardwright.testing import rank_mesh
from tests.tiers import only

from .along_cut_dims import Descending
from .cases import close, full, mesh, place

# By number of spatial dims; the weight of convolutions is 6 x 4 x 3 ...
OPS = {
    "conv": (2, lambda x, w: functional.conv2d(x, w, padding=1)),
    "conv with bias, not padded": (2, lambda x, w: functional.conv2d(x, w, w[:, 0, 0, 0])),
    "conv in steps": (2, lambda x, w: functional.conv2d(x, w, stride=2, padding=1)),
    "conv in steps longer than the kernel": (2, lambda x, w: functional.conv2d(x, w[:, :, :2], stride=3)),
    "dilated conv": (2, lambda x, w: functional.conv2d(x, w, padding=2, dilation=2)),
    "conv in groups": (2, lambda x, w: functional.conv2d(x, w[:, :2], padding=1, groups=2)),
    "conv1d": (1, lambda x, w: functional.conv1d(x, w, padding=1)),
    "conv3d": (3, lambda x, w: functional.conv3d(x, w, padding=1)),
    "transposed conv": (2, lambda x, w: functional.conv_transpose2d(x, w[:4, :3], stride=2, padding=1)),
    "max pool": (2, lambda x, w: functional.max_pool2d(x, 3, 2, 1)),
    "max pool up to the edge": (2, lambda x, w: functional.max_pool2d(x, 2, 2, ceil_mode=True)),
    "max pool with places": (2, lambda x, w: functional.max_pool2d(x, 3, 1, 1, return_indices=True)),
    "dilated max pool": (2, lambda x, w: functional.max_pool2d(x, 2, 1, 1, dilation=2)),
    "max pool in 1d": (1, lambda x, w: functional.max_pool1d(x, 3, 2, 1)),
    "max pool in 3d": (3, lambda x, w: functional.max_pool3d(x, 2)),
    "mean pool": (2, lambda x, w: functional.avg_pool2d(x, 3, 2, 1)),
    "mean pool of what is there": (
        2,
        lambda x, w: functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    ),
    "mean pool up to the edge": (2, lambda x, w: functional.avg_pool2d(x, 2, 2, ceil_mode=True)),
    "mean pool over a number": (2, lambda x, w: functional.avg_pool2d(x, 2, divisor_override=3)),
    "mean pool in 1d": (1, lambda x, w: functional.avg_pool1d(x, 3, 2, 1)),
}
SIZES = (9, 7, 5)
FEW = ("conv", "conv in steps", "max pool with places", "mean pool of what is there")


def _layouts(dims):
    if mesh().ndim == 1:
        uneven = (1, 3) if mesh().size() == 2 else (1, 0, 3)
        return [
            (sw.Shard(2),),
            (sw.Shard(1 + dims),),
            (sw.Ragged(uneven, dims=(2,)),),
            (sw.Interleaved(2, 2),),
        ]
    both = (sw.Shard(2), sw.Shard(1 + dims))
    return [both, (sw.Shard(0), sw.Shard(2)), (sw.Shard(2), sw.Shard(1)), (sw.Shard(2), sw.Partial())]


def _values(names):
    for name in names:
        dims, function = OPS[name]
        x, w = full(2, 4, *SIZES[:dims]), full(6, 4, *(3,) * dims, seed=1)
        plain, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
        wanted = function(plain, weight)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        cotangent = torch.cos(torch.arange(wanted[0].numel())).view(wanted[0].shape)
        (wanted[0] * cotangent).sum().backward()
        for layout in _layouts(dims):
            where, replicated = f"{name} {layout}", [sw.Replicate()] * mesh().ndim
            d, v = place(x, layout, requires_grad=True), place(w, replicated, requires_grad=True)
            got = function(d, v)
            got = got if isinstance(got, tuple) else (got,)
            for g, wants in zip(got, wanted, strict=True):
                close(g.detach(), wants.detach(), where)
            (got[0] * place(cotangent, replicated)).sum().backward()
            close(d.grad, plain.grad, where)
            if weight.grad is not None:
                close(v.grad, weight.grad, where)


@pytest.mark.parametrize("world", only([3], [2, 3, 4]))
def test_values_and_gradients_are_those_of_one_device(ranks, world):
    ranks(world, _values, list(OPS) if world == 2 else FEW)


def _in_another_order():
    """On (2, 1), where the axis of one coord holds the rows of the image, or its columns, from the last."""
    grid = rank_mesh((2, 1), ("dp", "tp"))
    x, w = full(2, 4, 9, 7), full(6, 4, 3, 3, seed=1)
    weight, whole = sw.distribute_tensor(w, grid, [sw.Replicate()] * 2), functional.conv2d(x, w, padding=1)
    for dim in (2, 3):
        image = sw.distribute_tensor(x, grid, [sw.Shard(2), Descending(dim)])
        with sw.trace() as seen:
            close(functional.conv2d(image, weight, padding=1), whole, dim)
        assert any("the borders of windows" in event.reason for event in seen.collectives), dim


def test_an_axis_of_one_coord_may_hold_a_dim_in_another_order(ranks):
    ranks(2, _in_another_order)


def _network():
    """Convolutions, batch norm, pooling and a linear layer on images whose rows are cut."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, groups=2),
        nn.AvgPool2d(2),
        nn.Conv2d(8, 4, 3, stride=2, padding=1),
        nn.Flatten(),
        nn.Linear(4 * 2 * 2, 5),
    )
    x, target = full(4, 3, 16, 16), torch.tensor([0, 1, 2, 3])
    placed = sw.distribute_module(copy.deepcopy(net), mesh())
    functional.cross_entropy(net(x), target).backward()
    rows = [sw.Shard(2)] if mesh().ndim == 1 else [sw.Shard(0), sw.Shard(2)]
    d = sw.distribute_tensor(x, mesh(), rows)
    functional.cross_entropy(placed(d), sw.distribute_tensor(target, mesh())).backward()
    for (name, parameter), other in zip(net.named_parameters(), placed.parameters(), strict=True):
        close(other.grad, parameter.grad, name)


@pytest.mark.parametrize("world", only([3], [3, 4]))
def test_a_convolutional_net_on_cut_images_has_the_gradients_of_one_device(ranks, world):
    ranks(world, _network)


def _bytes():
    """16 x 16 in 8 channels, 4 images, over 4 ranks: a row of the image is 4 * 8 * 16 * 4 = 2048 B."""
    x, w = full(4, 8, 16, 16), full(8, 8, 3, 3, seed=1)
    line = rank_mesh((4,), ("tp",))
    found = []
    for placement in (sw.Shard(2), sw.Shard(3)):
        d = sw.distribute_tensor(x, line, [placement]).requires_grad_()
        v = sw.distribute_tensor(w, line, [sw.Replicate()])
        with sw.trace() as forward:
            y = functional.conv2d(d, v, padding=1)
        assert y.placements == (placement,)
        with sw.trace() as backward:
            y.backward(torch.ones_like(y))
        assert d.grad.placements == (placement,)
        found.append((forward.bytes, backward.bytes, len(forward.collectives), len(backward.collectives)))
        assert any("borders" in decision.reason for decision in forward.decisions)
    return found


def test_only_the_borders_are_exchanged(ranks):
    """One row to each neighbour; in the backward the row again, and its gradient. A gather: 24,576 B."""
    row = 2048
    for rank, found in enumerate(ranks(4, _bytes)):
        neighbours = 1 if rank in (0, 3) else 2
        assert found == [(neighbours * row, 2 * neighbours * row, 1, 2)] * 2


def _in_blocks():
    """Both spatial dims cut on (2, 2): a row of 8 columns one way, a column of 8 + 1 rows the other."""
    x, w = full(1, 4, 16, 16), full(4, 4, 3, 3, seed=1)
    d = sw.distribute_tensor(x, mesh(), [sw.Shard(2), sw.Shard(3)])
    v = sw.distribute_tensor(w, mesh())
    with sw.trace() as t:
        y = functional.conv2d(d, v, padding=1)
    close(y, functional.conv2d(x, w, padding=1))
    assert y.placements == d.placements
    return t.bytes


def test_corners_travel_with_the_second_dim(ranks):
    assert ranks(4, _in_blocks) == [4 * 4 * (8 + 9)] * 4


def _refused():
    d = sw.distribute_tensor(full(2, 4, 8, 6), mesh(), [sw.Shard(2)])
    w = sw.distribute_tensor(full(6, 4, 3, 3), mesh())
    with sw.explicit():
        functional.conv2d(d, sw.distribute_tensor(full(6, 4, 1, 1), mesh()))  # no border, nothing to send
        with pytest.raises(ImplicitRedistributionError, match=r"convolution.*windows over a cut dim"):
            functional.conv2d(d, w, padding=1)


def test_an_exchange_is_refused_in_explicit_mode(ranks):
    ranks(2, _refused)


def _planted():
    """A halo that is one row short gives a wrong value, which the comparison sees."""
    short = plans.Halo.wanted
    plans.Halo.wanted = lambda self, coord: (short(self, coord)[0], max(short(self, coord)[1] - 1, 0))
    x, w = full(2, 4, 8, 6), full(6, 4, 3, 3)
    try:
        d = sw.distribute_tensor(x, mesh(), [sw.Shard(2)])
        with pytest.raises((AssertionError, RuntimeError)):
            close(
                functional.conv2d(d, sw.distribute_tensor(w, mesh()), padding=1),
                functional.conv2d(x, w, padding=1),
            )
    finally:
        plans.Halo.wanted = short


def test_a_border_that_is_too_short_goes_red(ranks):
    ranks(2, _planted)

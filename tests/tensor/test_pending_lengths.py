"""A negative number beside or in a pending length keeps its sign, whatever brings it there."""

import pytest
import torch

import shardwright as sw
from shardwright.testing.meshes import rank_mesh

from .cases import close

_X = torch.linspace(-2, 3, 24).view(4, 6)
_Y = torch.tensor([-1.0, 0.5, -4.0, -0.25])
_MADE = {
    "stack": lambda v, y: torch.stack([v, y]),
    "cat": lambda v, y: torch.cat([v, y]),
    "where": lambda v, y: torch.where(v > 3, v, y),
    "maximum": torch.maximum,
    "add": lambda v, y: v + 3 * y,
    "lerp": lambda v, y: v.lerp(y, 2.0),
    "index_copy": lambda v, y: v.index_copy(0, torch.arange(2), y[:2]),
}
_WRITTEN = {
    "copy_": lambda v, y: v.copy_(y),
    "lerp_": lambda v, y: v.lerp_(y, 2.0),
    "add_": lambda v, y: v.add_(y, alpha=9),
    "out=": lambda v, y: torch.mul(y, 2.0, out=v),
    "a slice": lambda v, y: v[:2].copy_(y[:2]),
    "an item": lambda v, y: v.__setitem__(0, -3.0),
    "fill_": lambda v, y: v.fill_(-2.0),
}


def _lengths():
    mesh = rank_mesh((2,), ("dp",))
    made = torch.linalg.vector_norm(sw.distribute_tensor(_X, mesh, [sw.Shard(1)]), dim=1)
    assert made.placements == (sw.Partial("norm2"),)
    return made


def _others():
    mesh = rank_mesh((2,), ("dp",))
    whole = sw.distribute_tensor(_Y, mesh, [sw.Replicate()])
    return whole, sw.distribute_tensor(_Y, mesh, [sw.Shard(0)]), whole.redistribute(mesh, [sw.Partial()])


def _made(way):
    with sw.spmd(rank_mesh((2,), ("dp",))):  # positions are plain
        for y in _others():
            close(_MADE[way](_lengths(), y), _MADE[way](_X.norm(dim=1), _Y))


def _written(way):
    for y in _others():
        v, wanted = _lengths(), _X.norm(dim=1)
        _WRITTEN[way](v, y)
        _WRITTEN[way](wanted, _Y)
        assert v.placements == (sw.Partial("norm2"),)
        close(v, wanted)


def _no_number():
    x = torch.tensor([[torch.inf, 1.0, torch.nan], [torch.nan, -torch.inf, 2.0]])
    for axis in (0, 1):
        d = sw.distribute_tensor(x, rank_mesh((2,), ("dp",)), [sw.Shard(axis)])
        made, wanted = torch.linalg.vector_norm(d, dim=axis), torch.linalg.vector_norm(x, dim=axis)
        assert made.placements == (sw.Partial("norm2"),)
        torch.testing.assert_close(made.full_tensor(), wanted, equal_nan=True)


def test_the_length_of_infinity_and_no_number_is_none(ranks):
    ranks(2, _no_number)


@pytest.mark.parametrize("way", _MADE)
def test_what_is_made_of_a_length_and_another_value_keeps_signs(ranks, way):
    ranks(2, _made, way)


@pytest.mark.parametrize("way", _WRITTEN)
def test_negative_numbers_that_are_written_into_a_length_keep_their_sign(ranks, way):
    ranks(2, _written, way)

"""A rank that holds nothing of a tensor gives what the op gives: an empty part, in the form of the result."""

from __future__ import annotations

import torch
from torch.nn import functional

import shardwright as sw
from tests.tensor.cases import full, mesh, place


def _all_on_the_last_rank():
    """The layers of one network, stacked: torch takes the lists apart that unbind and split return."""
    x, h, w, u = full(4, 3, 6), full(1, 4, 5, seed=1), full(15, 6, seed=2), full(15, 5, seed=3)
    wanted = torch.gru(x, h, [w, u], False, 1, 0.0, False, False, True)[0]
    x, h, w, u = (place(v, [sw.Owner(1)]) for v in (x, h, w, u))
    got = torch.gru(x, h, [w, u], False, 1, 0.0, False, False, True)[0]
    torch.testing.assert_close(got.full_tensor(), wanted)
    assert isinstance(h.unbind(), tuple)
    assert len(h.unbind()) == 1


def _no_images():
    """A batch of none is an argument to these ops, images without channels are none."""
    images, rows = full(0, 1, 5, 5), full(0, 1, 9)
    for function, x in (
        (lambda x: functional.unfold(x, 2), images),
        (lambda x: functional.avg_pool1d(x, 3), rows),
        (lambda x: functional.max_pool2d(x, 2), images),
    ):
        got = function(place(x, [sw.Shard(1)] * mesh().ndim))
        assert got.shape == function(x).shape
        assert not got.full_tensor().numel()


def _broadcast_beside_elements():
    """A part without elements is `(1, 0)` of elements cut in order, `(0, 1)` of rows: neither broadcasts."""
    x, one = full(1, 7), full(1, 1, seed=1)
    for placements in ([sw.Shard(0), sw.Ragged((1, 1), (0, 1))], [sw.Owner(0), sw.Ragged((1, 2), (0, 1))]):
        for other in ([sw.Partial(), sw.Shard(0)], [sw.Shard(0), sw.Shard(1)], [sw.Replicate(), sw.Owner(1)]):
            here, there = place(x, placements), place(one, other)
            for got, wanted in (
                (here * there, x * one),
                (torch.where(there > 0, here, there), torch.where(one > 0, x, one)),
                (torch._foreach_mul([here, here], [there, there])[1], x * one),
                (here.clone().mul_(there), x * one),
            ):
                torch.testing.assert_close(got.full_tensor(), wanted)


def test_one_element_broadcasts_beside_elements_cut_in_order(ranks):
    ranks(4, _broadcast_beside_elements)


def test_a_list_of_one_stays_a_list(ranks):
    ranks(2, _all_on_the_last_rank)


def test_a_batch_of_none_may_be_cut_along_its_channels(ranks):
    ranks(2, _no_images)

"""A rank that holds nothing of a tensor gives what the op gives: an empty part, in the form of the result."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import shardwright as sw
from shardwright.testing.meshes import rank_mesh
from tests.tensor.cases import close, full, mesh, place
from tests.tiers import only


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
        (lambda x: functional.interpolate(x, scale_factor=2), images),
        (lambda x: functional.interpolate(x, 4, mode="nearest-exact"), rows),
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


def _beside_what_is_pending(kinds, *, every):
    """A rank of a cut without elements, on an axis beside one that has another reduction pending."""
    mesh = rank_mesh((2, 2), ("a", "b"))
    values = torch.tensor([[2, 3, 1, 0, 5, 3], [1, 4, 2, 3, 2, 2]])
    for at, kind in enumerate(kinds.split()):
        for dtype in (torch.float32, torch.int64) if every else ((torch.float32, torch.int64)[at % 2],):
            value, pending = values.to(dtype), sw.Partial(kind)
            if not pending.in_domain(value):
                continue
            for cut in (
                sw.Ragged((1, 0), (0,)),
                sw.Ragged((0, 1), (0,)),
                sw.Owner(1),
                sw.Ragged((1, 0), (1,)),
            ):
                for first in (True, False):
                    axes = (pending, cut) if first else (cut, pending)
                    whole = tuple(sw.Replicate() if p is pending else p for p in axes)
                    x = sw.distribute_tensor(value, mesh, whole, src_data_rank=None).redistribute(mesh, axes)
                    with sw.spmd(mesh):
                        for name, read in READ.items():
                            close(read(x), read(value), f"{name} {axes} {dtype}")


PENDING = ["sum max", "product min avg", "norm2 bor"]
READ = {
    "index": lambda v: v[torch.tensor([0, 1]), torch.tensor([3, 0])],
    "one index": lambda v: v[torch.tensor([1, 0])],
    "index_select": lambda v: v.index_select(1, torch.tensor([4, 0])),
    "gather": lambda v: v.gather(0, torch.tensor([[1, 0, 1, 0, 0, 1]])),
    "sum": lambda v: v.sum(0),
    "amax": lambda v: v.amax(0),
    "prod": lambda v: v.prod(1),
    "select": lambda v: v[1] * 2,
    "embedding": lambda v: torch.nn.functional.embedding(torch.tensor([1, 0, 1]), v),
    "trace": lambda v: v[:, :2].trace(),
    "take": lambda v: v.take(torch.tensor([0, 7, 3])),
}


@pytest.mark.parametrize("kinds", only([PENDING[0]], PENDING))
def test_a_rank_of_a_cut_leaves_what_is_pending_on_another_axis(ranks, kinds):
    ranks(4, _beside_what_is_pending, kinds, every=kinds != PENDING[0], timeout=120)


def _no_rows():
    for cut in (sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Partial("sum")):
        x = sw.distribute_tensor(torch.ones(0, 3), rank_mesh((2,), ("tp",)), [cut]).requires_grad_()
        assert list(x) == []
        assert (x * 1).unbind(0) == () == x.t().unbind(1)


def test_there_are_no_rows_of_no_rows(ranks):
    ranks(2, _no_rows)


def _devices():
    mesh = rank_mesh((3,), ("axis",))
    made = {
        "to": lambda x: x.to("meta"),
        "to, with a dtype": lambda x: x.to("meta", torch.float64),
        "zeros_like": lambda x: torch.zeros_like(x, device="meta"),
        "empty_like": lambda x: torch.empty_like(x, device="meta"),
        "full_like": lambda x: torch.full_like(x, 2.0, device="meta"),
        "new_zeros": lambda x: x.new_zeros((), device="meta"),
    }
    found = []
    for placement in (sw.Owner(0), sw.Replicate()):
        x = sw.distribute_tensor(torch.tensor(1.0), mesh, [placement])
        for name, make in made.items():
            result = make(x)
            found.append((name, str(result.device), str(result.to_local().device)))
    return found


def test_results_are_on_the_device_that_was_asked_for(ranks):
    """A rank that holds nothing makes no call: torch asks results where they are, and goes on by that."""
    for found in ranks(3, _devices):
        assert {devices for _, *devices in found for devices in devices} == {"meta"}, found


def _second_derivatives():
    mesh = rank_mesh((3,), ("axis",))
    made = torch.Generator().manual_seed(0)
    weight, x = torch.randn(5, 5, generator=made), torch.randn(5, generator=made)
    wanted = torch.func.hessian(lambda x: (x @ weight[0]).sin())(x)
    cut = sw.distribute_tensor(weight, mesh, [sw.Shard(0)])
    whole = sw.distribute_tensor(x, mesh, [sw.Replicate()])
    with sw.spmd(mesh):
        found = torch.func.hessian(lambda x: (x @ cut[0]).sin())(whole)
    torch.testing.assert_close(found.full_tensor(), wanted)


def test_a_hessian_through_what_one_rank_holds(ranks):
    ranks(3, _second_derivatives)

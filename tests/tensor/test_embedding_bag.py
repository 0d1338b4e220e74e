"""`embedding_bag` of cut operands: values and gradients of one device, and what stays where it is."""

from itertools import product

import pytest
import torch
from torch.nn import functional

import shardwright as sw
from shardwright.testing.meshes import rank_mesh

R, S0, S1 = sw.Replicate(), sw.Shard(0), sw.Shard(1)
TABLE = torch.randn(11, 6, generator=torch.Generator().manual_seed(1))
INDEX = torch.randint(0, 11, (6, 3), generator=torch.Generator().manual_seed(2))
WEIGHTS = torch.randn(6, 3, generator=torch.Generator().manual_seed(3))
OFFSETS = torch.tensor([0, 2, 2, 9, 13, 18])
LAYOUTS = [(R, S0), (R, S1), (S0, R), (S1, R), (S0, S0), (sw.Partial(), R), (R, R)]


def _losses(call, table, *others):
    out = call(table, *others)
    weighted = [x for x in others if x.is_floating_point()]
    grads = torch.autograd.grad(out.square().sum(), [table, *weighted])
    return [x.full_tensor() if isinstance(x, sw.DTensor) else x for x in (out, *grads)]


def _equals_one_device(call, operands):
    """Operands with their placements; the first is the table."""
    mesh = rank_mesh((3,), ("axis",))
    plain = [x.clone().requires_grad_(x.is_floating_point()) for x, _ in operands]
    placed = [sw.distribute_tensor(x, mesh, [p]).requires_grad_(x.is_floating_point()) for x, p in operands]
    for got, wanted in zip(_losses(call, *placed), _losses(call, *plain), strict=True):
        torch.testing.assert_close(got, wanted)


def _of_one_length(mode, padding):
    def bag(table, index, weights=None):
        options = {"mode": mode, "padding_idx": padding, "per_sample_weights": weights}
        return functional.embedding_bag(index, table, **options)

    for of_table, of_index in LAYOUTS:
        operands = [(TABLE, of_table), (INDEX, of_index)]
        _equals_one_device(bag, operands)
        if mode == "sum":
            _equals_one_device(bag, [*operands, (WEIGHTS, of_index)])


@pytest.mark.parametrize(("mode", "padding"), [*product(("sum", "mean", "max"), (None, 3, -2))])
def test_bags_of_one_length(ranks, mode, padding):
    ranks(3, _of_one_length, mode, padding)


def _of_offsets(mode, last):
    def bag(table, index, offsets):
        options = {"mode": mode, "include_last_offset": last, "padding_idx": 2}
        return functional.embedding_bag(index, table, offsets, **options)

    for (of_table, of_index), of_offsets in product(LAYOUTS, (R, S0)):
        if of_index != S1:
            given = [(TABLE, of_table), (INDEX.flatten(), of_index), (OFFSETS, of_offsets)]
            _equals_one_device(bag, given)


@pytest.mark.parametrize(("mode", "last"), [*product(("sum", "mean", "max"), (False, True))])
def test_bags_of_any_length(ranks, mode, last):
    ranks(3, _of_offsets, mode, last)


def _stays():
    mesh = rank_mesh((3,), ("axis",))
    kept = {(R, S0): S0, (R, S1): sw.Partial(), (S0, R): sw.Partial(), (S1, R): S1}
    for (of_table, of_index), wanted in kept.items():
        table, index = (sw.distribute_tensor(x, mesh, [p]) for x, p in ((TABLE, of_table), (INDEX, of_index)))
        with sw.trace() as seen:
            out = functional.embedding_bag(index, table, mode="mean")
        assert (out.placements, seen.bytes) == ((wanted,), 0), (of_table, of_index)


def test_tables_and_indices_stay_where_they_are(ranks):
    ranks(3, _stays)


def _refused():
    mesh = rank_mesh((3,), ("axis",))
    table, index = sw.distribute_tensor(TABLE, mesh, [S1]), sw.distribute_tensor(INDEX, mesh, [R])
    with pytest.raises(ValueError, match="if input is 2D, then offsets has to be None"):
        functional.embedding_bag(index, table, index[:, 0])
    offsets = sw.distribute_tensor(OFFSETS + 1, mesh, [R])
    with pytest.raises(RuntimeError, match=r"offsets\[0\] has to be 0"):
        functional.embedding_bag(index.flatten(), table, offsets)


def test_what_torch_refuses_is_refused_in_its_words(ranks):
    ranks(3, _refused)


def _erased():
    mesh = rank_mesh((3,), ("axis",))
    given = ((TABLE, S1), (INDEX.flatten(), R), (OFFSETS, R))
    table, index, offsets = (sw.distribute_tensor(x, mesh, [p]) for x, p in given)
    fast = sw.erase(functional.embedding_bag)
    wanted = functional.embedding_bag(INDEX.flatten(), TABLE, OFFSETS)
    for _ in range(3):
        torch.testing.assert_close(fast(index, table, offsets).full_tensor(), wanted)
    assert (fast.report().recordings, fast.report().as_it_is) == (1, {}), str(fast)


def test_a_recording_reads_no_offsets(ranks):
    ranks(3, _erased)

"""Padded batches packed and padded again: lengths are sizes, plain or not; values and gradients as on one."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

import shardwright as sw
from shardwright.compat import pad_sequences
from shardwright.errors import RuleError
from shardwright.tensor.plain import boundary
from shardwright.testing.meshes import rank_mesh

from .cases import close

_SORTED, _ANY = [5, 3, 2, 1], [4, 2, 5, 1]


def _there_and_back(x, lengths, first):
    y = x.detach().clone().requires_grad_()
    packed = rnn.pack_padded_sequence(y, lengths, batch_first=first, enforce_sorted=False)
    padded, back = rnn.pad_packed_sequence(packed, batch_first=first, padding_value=0.5)
    padded.square().sum().backward()
    return packed.data, padded, y.grad, packed.batch_sizes, back


def _packed(placement, first):
    mesh = rank_mesh((2,), ("dp",))
    torch.manual_seed(0)
    x = torch.randn((4, 5, 3) if first else (5, 4, 3))
    ours = sw.distribute_tensor(x, mesh, [placement])
    for lengths in (_SORTED, _ANY):
        wanted = _there_and_back(x, lengths, first)
        there = sw.distribute_tensor(torch.tensor(lengths), mesh, [sw.Shard(0)])
        for form in (lengths, torch.tensor(lengths), there):
            for got, one in zip(_there_and_back(ours, form, first), wanted, strict=True):
                close(got, one)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("placement", [sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Shard(2)], ids=repr)
def test_a_padded_batch_is_packed_and_padded_again(ranks, placement, first):
    ranks(2, _packed, placement, first)


def _through_a_network():
    mesh = rank_mesh((2,), ("dp",))
    torch.manual_seed(0)
    one = nn.LSTM(3, 4, bidirectional=True)
    ours = sw.distribute_module(copy.deepcopy(one), mesh)
    x = torch.randn(5, 4, 3)
    for placement in (sw.Replicate(), sw.Shard(1)):
        with sw.spmd(mesh):  # the first states are zeros that the module makes
            packed = rnn.pack_padded_sequence(
                sw.distribute_tensor(x, mesh, [placement]), _ANY, enforce_sorted=False
            )
            out, states = ours(packed)
        wanted, wanted_states = one(rnn.pack_padded_sequence(x, _ANY, enforce_sorted=False))
        close(out.data, wanted.data)
        for got, state in zip(states, wanted_states, strict=True):
            close(got, state)


def test_a_packed_batch_goes_through_an_lstm(ranks):
    ranks(2, _through_a_network)


def _refused():
    x = sw.distribute_tensor(torch.randn(5, 4, 3), rank_mesh((2,), ("dp",)), [sw.Shard(1)])
    for lengths, text in (
        (_ANY, "sorted in decreasing order"),
        ([5, 3], "batch_size"),
        ([5, 3, 2, 0], "greater than 0"),
    ):
        with pytest.raises(RuntimeError, match=text):
            rnn.pack_padded_sequence(x, lengths)


def test_bad_lengths_are_refused_in_the_words_of_torch(ranks):
    ranks(2, _refused)


def _padded_lists(placement):
    mesh = rank_mesh((2,), ("dp",))
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    given = sw.distribute_tensor(x, mesh, [sw.Replicate()]).redistribute(mesh, [placement]).detach()
    weights = torch.arange(60.0).view(3, 4, 5)
    for kwargs in ({}, {"batch_first": True, "padding_value": 0.5}, {"padding_side": "left"}):
        results = []
        for y in (x.clone(), given.clone()):
            y.requires_grad_()
            padded = rnn.pad_sequence([y[:2], y, y[1:1]], **kwargs)
            of = weights if kwargs.get("batch_first") else weights.transpose(0, 1)
            seed = of if type(y) is torch.Tensor else sw.distribute_tensor(of, mesh, [sw.Replicate()])
            padded.backward(seed)
            results.append((padded, y.grad))
        for one, got in zip(*results, strict=True):
            close(got, one)
    with pytest.raises(RuntimeError, match="must match the size"):
        rnn.pad_sequence([given[:, :4], given])


@pytest.mark.parametrize("placement", [sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Partial()], ids=repr)
def test_a_list_of_sequences_is_padded_with_their_gradients(ranks, placement):
    ranks(2, _padded_lists, placement)


def _lost_gradients():
    x = sw.distribute_tensor(torch.randn(4, 5), rank_mesh((2,), ("dp",)), [sw.Shard(0)]).requires_grad_()
    own = boundary.OWN.pop(pad_sequences)
    try:
        with torch.no_grad():
            assert rnn.pad_sequence([x, x[:2]]).shape == (4, 2, 5)
        with pytest.raises(RuleError, match="no gradient finds its way back"):
            rnn.pad_sequence([x, x[:2]])
    finally:
        boundary.OWN[pad_sequences] = own


def test_a_function_of_torch_that_writes_into_memory_of_its_own_is_refused_where_gradients_are_wanted(ranks):
    ranks(2, _lost_gradients)


def _new_leaves():
    x = sw.distribute_tensor(torch.randn(4), rank_mesh((2,), ("dp",)), [sw.Shard(0)])
    leaf = x.new_tensor([1.0, 2.0], requires_grad=True)
    assert leaf.is_leaf
    assert leaf.requires_grad


def test_a_tensor_that_torch_makes_beside_a_distributed_one_may_want_a_gradient(ranks):
    ranks(2, _new_leaves)

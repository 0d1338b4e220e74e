"""A replay draws the numbers that the call would draw, and leaves the generator where the call would."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.testing.meshes import rank_mesh

from .programs import assert_equal, assert_replayed, batches, block, placed


def _noise(x):
    mask = torch.bernoulli(torch.full_like(x, 0.5))
    return nn.functional.dropout(x, 0.3) * mask + torch.rand_like(x) + torch.randn_like(x)


def _draws(placement):
    mesh = rank_mesh((dist.get_world_size(),), ("tp",))
    fast = sw.erase(_noise)
    for turn in range(4):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(turn))
        torch.manual_seed(turn)
        wanted = [_noise(x), torch.rand(1)]
        torch.manual_seed(turn)
        found = fast(sw.distribute_tensor(x, mesh, {"tp": placement}))
        assert_equal(found, wanted[0], exact=True)
        assert torch.equal(torch.rand(1), wanted[1]), "the generator stands elsewhere"
    assert_replayed(fast, 1, 3)


@pytest.mark.parametrize("placement", [sw.Replicate(), sw.Shard(0)], ids=str)
def test_random_ops_draw_what_one_device_draws(ranks, placement):
    ranks(2, _draws, placement)


def _trains_with_dropout():
    plain = block(p=0.2).train()
    model, place = placed(plain, "batch", dist.get_world_size())
    fast = sw.erase(model)
    for turn, batch in enumerate(batches(4)):
        torch.manual_seed(turn)
        wanted = plain(batch)
        wanted.sum().backward()
        torch.manual_seed(turn)
        found = fast(place(batch))
        assert_equal(found, wanted)
        found.sum().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-5)
    assert fast.report().replays >= 2, str(fast.report())


def test_dropout_in_a_block_drops_what_one_device_drops(ranks):
    ranks(2, _trains_with_dropout)


def _keyed_draws_run_as_they_are():
    mesh = rank_mesh((dist.get_world_size(),), ("tp",))
    x = sw.distribute_tensor(torch.ones(8), mesh, {"tp": sw.Shard(0)})
    fast = sw.erase(torch.nn.functional.dropout)
    found = []
    with sw.random_mode("counter"):
        for function in (fast, torch.nn.functional.dropout):
            torch.manual_seed(0)
            found.append([function(x).full_tensor() for _ in range(4)])
    assert all(map(torch.equal, *found))
    assert fast.report().recordings == 0
    assert "item()" in str(fast.report())


def test_keys_that_the_host_draws_are_refused(ranks):
    ranks(2, _keyed_draws_run_as_they_are)


def _attends(x):
    heads = x[None, None]
    out = nn.functional.scaled_dot_product_attention(heads, heads, heads)
    return out * 2 if bool((out > 0).all()) else out


def test_an_attention_without_dropout_draws_nothing():
    """Whatever torch's tags say: a guard may run it again."""
    fast = sw.erase(_attends)
    for x in (torch.ones(4, 4), torch.ones(4, 4), -torch.ones(4, 4)):
        assert_equal(fast(x), _attends(x), exact=True)
    assert "held where this gives (True,)" in str(fast), str(fast)
    assert fast.report().recordings == 2

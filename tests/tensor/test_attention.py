"""Attention with cut batch, heads, queries and keys: values, gradients, and what is sent."""

import pytest
import torch
from torch.nn import functional

import shardwright as sw
from shardwright.testing import rank_mesh
from tests.tiers import only

from .along_cut_dims import Descending
from .cases import close, full, mesh, place

QUERIES, KEYS = 5, 7


def _mask(kind):
    """An additive mask; one hides every key from a query, one a key from every query."""
    made = torch.zeros(QUERIES, KEYS)
    made[1] = -torch.inf
    made[:, 2] = -torch.inf
    made[2, 3:] = -torch.inf
    return (
        made if kind == "rows" else made[:1].mul(0).expand(2, 1, 1, KEYS).masked_fill(made[0] < 0, -torch.inf)
    )


KINDS = {
    "plain": {},
    "causal": {"is_causal": True},
    "masked": {"attn_mask": "rows"},
    "masked per image": {"attn_mask": "broadcast"},
    "shared heads": {"enable_gqa": True},
    "scaled causal": {"is_causal": True, "scale": 0.3},
}


def _operands(kind):
    heads = 2 if kind == "shared heads" else 4
    return full(2, 4, QUERIES, 8), full(2, heads, KEYS, 8, seed=1), full(2, heads, KEYS, 8, seed=2)


def _no_numbers():
    """All keys that a query sees on one rank are nan; those on the other are not."""
    query, key, value = (full(2, 4, 16, 8, seed=seed) for seed in range(3))
    key[:, :, 8:] = torch.nan
    for queries, keys, causal in ((9, slice(9), True), (16, slice(None), False), (1, slice(None), False)):
        given = query[:, :, :queries], key[:, :, keys], value[:, :, keys]
        wanted = functional.scaled_dot_product_attention(*given, is_causal=causal)
        for of_query in (sw.Shard(2), sw.Replicate()):
            placed = [place(x, (p,)) for x, p in zip(given, (of_query, *[sw.Shard(2)] * 2), strict=True)]
            got = functional.scaled_dot_product_attention(*placed, is_causal=causal)
            torch.testing.assert_close(got.full_tensor(), wanted, equal_nan=True)


def test_keys_that_are_no_numbers_leave_none_beside_other_keys(ranks):
    ranks(2, _no_numbers)


def _layouts():
    """Of queries and of keys and values."""
    whole = sw.Replicate()
    if mesh().ndim > 1:
        cut = (sw.Shard(2), sw.Shard(2))
        return [
            (cut, cut),
            ((sw.Shard(2), whole), (whole, sw.Shard(2))),
            ((sw.Shard(1), whole), (sw.Shard(1), sw.Shard(2))),
            ((sw.Shard(0), sw.Shard(2)), (sw.Shard(0), sw.ZigZag(2))),
        ]
    pairs = [(p, p) for p in (sw.Shard(0), sw.Shard(1), sw.Shard(2), sw.ZigZag(2), sw.Partial())]
    pairs += [
        (sw.Shard(2), whole),
        (sw.ZigZag(2), whole),
        (whole, sw.Shard(2)),
        (whole, sw.Ragged((0, 1), (2,))),
    ]
    return [((q,), (k,)) for q, k in pairs if mesh().size() == 2 or not isinstance(k, sw.Ragged)]


def _values():
    for kind, options in KINDS.items():
        operands = _operands(kind)
        given = {**options}
        if "attn_mask" in given:
            given["attn_mask"] = _mask(given["attn_mask"])
        plain = [x.clone().requires_grad_() for x in operands]
        wanted = functional.scaled_dot_product_attention(*plain, **given)
        cotangent = torch.cos(torch.arange(wanted.numel())).view(wanted.shape)
        (wanted * cotangent).sum().backward()
        for queries, keys in _layouts():
            where = f"{kind}: queries {queries}, keys {keys}"
            placed = [
                place(x, p, requires_grad=True) for x, p in zip(operands, (queries, keys, keys), strict=True)
            ]
            with sw.spmd(mesh(), check=False):
                got = functional.scaled_dot_product_attention(*placed, **given)
                (got * cotangent).sum().backward()
            close(got.detach(), wanted.detach(), where)
            for x, p in zip(placed, plain, strict=True):
                close(x.grad, p.grad, where)


@pytest.mark.parametrize("world", only([2], [2, 4]))
def test_values_and_gradients_are_those_of_one_device(ranks, world):
    ranks(world, _values)


def _in_another_order():
    """On (2, 1), where the axis of one coord holds the sequence from its last position."""
    grid = rank_mesh((2, 1), ("dp", "cp"))
    operands = full(2, 4, 8, 8), full(2, 4, 8, 8, seed=1), full(2, 4, 8, 8, seed=2)
    wanted = functional.scaled_dot_product_attention(*operands, is_causal=True)
    cut, whole = (sw.Shard(2), Descending(2)), (sw.Replicate(),) * 2
    for queries in (cut, whole):  # a ring, and parts of the keys
        placed = [
            sw.distribute_tensor(x, grid, p) for x, p in zip(operands, (queries, cut, cut), strict=True)
        ]
        close(functional.scaled_dot_product_attention(*placed, is_causal=True), wanted, queries)
    for dim in (0, 1, 3):  # rows, heads or width of the queries alone
        other = [(sw.Shard(2), Descending(dim)), (sw.Shard(2), sw.Replicate()), (sw.Shard(2), sw.Replicate())]
        placed = [sw.distribute_tensor(x, grid, p) for x, p in zip(operands, other, strict=True)]
        close(functional.scaled_dot_product_attention(*placed, is_causal=True), wanted, dim)


def test_an_axis_of_one_coord_may_hold_the_sequence_in_another_order(ranks):
    ranks(2, _in_another_order)


def _sent():
    """256 keys for 4 queries of 2 heads: gathering keys and values would send 24,576 B."""
    line = rank_mesh((4,), ("cp",))
    q, k, v = full(1, 2, 4, 16), full(1, 2, 256, 16, seed=1), full(1, 2, 256, 16, seed=2)
    wanted = functional.scaled_dot_product_attention(q, k, v)
    q, *keys = (
        sw.distribute_tensor(x, line, [p])
        for x, p in ((q, sw.Replicate()), (k, sw.Shard(2)), (v, sw.Shard(2)))
    )
    with sw.trace() as t:
        got = functional.scaled_dot_product_attention(q, *keys)
    close(got, wanted)
    assert any("averaged by their weights" in decision.reason for decision in t.decisions)
    long = sw.distribute_tensor(full(1, 2, 256, 16), line, [sw.Shard(2)])
    with sw.trace() as own:
        functional.scaled_dot_product_attention(
            long, *(x.redistribute([sw.Replicate()]) for x in keys), is_causal=True
        )
    assert not [d for d in own.decisions if "redistribute" in d.reason]
    return t.bytes


def test_few_queries_send_rows_of_results_not_keys(ranks):
    """The sums: 2 * 3/4 of 8 rows of 17 numbers. The maxima of 8 rows: exchanged and gathered, 2 * 3/4."""
    assert ranks(4, _sent) == [2 * 3 * 8 * 17 * 4 // 4 + 2 * 3 * 8 * 4 // 4] * 4


def _ranks_without_keys():
    """Four keys over three ranks leave the last without any; its logs have the type of its peers'."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        q, k, v = (full(1, 2, n, 4, seed=n).to(dtype) for n in (1, 4, 4))
        for causal in (False, True):
            wanted = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
            parts = [place(q, (sw.Replicate(),)), place(k, (sw.Shard(2),)), place(v, (sw.Shard(2),))]
            got = functional.scaled_dot_product_attention(*parts, is_causal=causal)
            assert got.dtype == dtype
            tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(got.full_tensor(), wanted, rtol=tolerance, atol=tolerance)


def test_a_rank_may_hold_no_key(ranks):
    ranks(3, _ranks_without_keys)


def _nobody_uses_the_attention():
    """A list's gradient leaves it out: undefined there, on ranks that hold no head too."""
    for cut in (sw.Shard(1), sw.Shard(0), sw.Replicate()):
        found = []
        for made in (lambda x: x.clone(), lambda x, cut=cut: place(x, (cut,))):
            q, k, v = (made(full(1, 2, n, 4, seed=n)).requires_grad_() for n in (3, 4, 4))
            attended = functional.scaled_dot_product_attention(q, k, v)
            _, used = torch._foreach_tanh([attended, k])
            used.backward(made(full(1, 2, 4, 4, seed=9)))
            found.append((q.grad, k.grad, v.grad))
        assert [x is None for x in found[1]] == [x is None for x in found[0]] == [True, False, True]
        close(found[1][1], found[0][1])


def test_attention_that_nobody_uses_has_no_gradient(ranks):
    ranks(3, _nobody_uses_the_attention)

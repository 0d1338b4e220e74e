"""Attention whose queries and keys are cut along the sequence: a ring, an exchange of heads, the choice."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import shardwright as sw
from shardwright.tensor.attention.asked import attention_by
from shardwright.testing import rank_mesh
from tests.tiers import only

from .attention import KINDS, cut, differing, one_device

ALONG = {
    "ZigZag": lambda n: [sw.ZigZag(2)],
    "Shard": lambda n: [sw.Shard(2)],
    "Ragged": lambda n: [sw.Ragged((2, 0, 1, 3)[:n], (2,))],
    "BlockCyclic": lambda n: [sw.BlockCyclic(2, 2)],
}


def _line(kinds, placement, length, way, dtype=torch.float32):
    """What differs, and the kinds that did not go the way that was asked for."""
    n = torch.distributed.get_world_size()
    mesh, wrong = rank_mesh((n,), ("cp",)), {}
    for name in kinds:
        kind = KINDS[name]
        found, gone = cut(kind, length, dtype, mesh, ALONG[placement](n), way)
        lines = differing(found, one_device(kind, length, dtype))
        lines += [] if gone == [way] or way == "auto" else [f"went {gone}"]
        if lines:
            wrong[name] = lines
    return wrong


@pytest.mark.parametrize("world", only([3], [2, 3, 4]))
@pytest.mark.parametrize("placement", only(["ZigZag", "Ragged"], ALONG))
def test_a_ring_gives_values_and_gradients_of_one_device(ranks, world, placement):
    assert ranks(world, _line, list(KINDS), placement, 13, "ring") == [{}] * world


_WHOLE_HEADS = [name for name, kind in KINDS.items() if kind.shared == 6]


@pytest.mark.parametrize("world", only([3], [2, 3]))
def test_an_exchange_of_heads_gives_values_and_gradients_of_one_device(ranks, world):
    assert ranks(world, _line, _WHOLE_HEADS, "ZigZag", 13, "all_to_all") == [{}] * world


def test_ranks_need_not_divide_the_heads(ranks):
    assert ranks(4, _line, ["causal", "window"], "ZigZag", 13, "all_to_all") == [{}] * 4


@pytest.mark.parametrize("length", [1, 3, 5])
def test_a_rank_may_hold_nothing_of_the_sequence(ranks, length):
    kinds = ["causal", "causal, grouped", "window", "full", "wide values"]
    for placement in ("ZigZag", "Shard"):
        assert ranks(4, _line, kinds, placement, length, "ring") == [{}] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_half_and_double_types(ranks, dtype):
    kinds = ["causal", "causal, grouped", "padding", "wide values"]
    assert ranks(3, _line, kinds, "ZigZag", 13, "ring", dtype) == [{}] * 3


_TWO_AXES = {
    "rows": (sw.Shard(0), sw.ZigZag(2)),
    "heads": (sw.Shard(1), sw.ZigZag(2)),
    "the sequence too": (sw.Shard(2), sw.ZigZag(2)),
    "nothing": (sw.Replicate(), sw.ZigZag(2)),
}


def _grid(placements, kinds, way):
    mesh, wrong = rank_mesh((2, 2), ("other", "cp")), {}
    for name in kinds:
        kind = KINDS[name]
        found, gone = cut(kind, 13, torch.float32, mesh, _TWO_AXES[placements], way)
        lines = differing(found, one_device(kind, 13, torch.float32))
        if lines or gone != [way]:
            wrong[name] = (lines, gone)
    return wrong


@pytest.mark.parametrize("placements", _TWO_AXES)
def test_another_axis_may_cut_rows_heads_or_the_sequence_too(ranks, placements):
    kinds = ["causal", "padding", "added to heads", "causal, grouped"]
    assert ranks(4, _grid, placements, kinds, "ring") == [{}] * 4


def test_heads_are_exchanged_beside_another_axis(ranks):
    for placements in ("rows", "nothing"):
        assert ranks(4, _grid, placements, ["causal", "padding", "added to heads"], "all_to_all") == [{}] * 4


def _queries_and_keys_cut_in_two_ways():
    mesh, kind = rank_mesh((3,), ("cp",)), KINDS["causal"]
    placements = {"queries": [sw.ZigZag(2)], "keys": [sw.Shard(2)]}
    found, gone = cut(kind, 13, torch.float32, mesh, placements, "ring")
    return differing(found, one_device(kind, 13, torch.float32)), gone


def test_queries_and_keys_may_be_cut_in_two_ways(ranks):
    assert ranks(3, _queries_and_keys_cut_in_two_ways) == [([], ["ring"])] * 3


def _chosen():
    """The way of least bytes: n/2 as much in a ring as by heads, unless few heads share keys."""
    n = torch.distributed.get_world_size()
    mesh = rank_mesh((n,), ("cp",))
    return [
        cut(KINDS[name], 12, torch.float32, mesh, [sw.ZigZag(2)], "auto")[1][0]
        for name in ("causal", "causal, grouped", "one head of keys")
    ]


def test_the_way_of_fewer_bytes_is_chosen(ranks):
    assert ranks(2, _chosen) == [["ring", "ring", "ring"]] * 2
    assert ranks(3, _chosen) == [["all_to_all", "ring", "ring"]] * 3


@pytest.mark.parametrize(
    ("found", "wanted"), [(["result: off by 1.0e+00"], 1.0), ([], 1e-9)], ids=["a fault", "rounding"]
)
def test_what_differs_is_said(found, wanted):
    whole = [torch.ones(2)] * 4
    assert differing([torch.ones(2) + wanted, *whole[1:]], whole) == found


def _rows_for_some_ranks():
    """One row over two ranks of another axis, and a mask that is repeated without memory."""
    mesh = rank_mesh((2, 2), ("other", "cp"))
    made = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 7, 4, generator=made)
    later = torch.ones(7, 7, dtype=torch.bool).tril().expand(1, 2, 7, 7)
    found = []
    for options in ({"is_causal": True}, {"attn_mask": later}):
        plain = q.clone().requires_grad_()
        wanted = scaled_dot_product_attention(plain, plain, plain, **options)
        wanted.sin().sum().backward()
        x = sw.distribute_tensor(q, mesh, [sw.Shard(0), sw.ZigZag(2)]).requires_grad_()
        with attention_by("ring"), sw.spmd(mesh, check=False):
            out = scaled_dot_product_attention(x, x, x, **options)
            out.sin().sum().backward()
        torch.testing.assert_close(out.full_tensor(), wanted)
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
        found.append(out.to_local().shape[0])
    return found


def test_ranks_without_rows_take_part_in_no_kernel(ranks):
    assert sorted(ranks(4, _rows_for_some_ranks)) == [[0, 0], [0, 0], [1, 1], [1, 1]]

"""A list of tensors moves together: the values and gradients of moving one by one, fewer collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardwright as sw


def _values_and_gradients() -> int:
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    whole = [torch.randn(n, 3) for n in (4, 6, 2, 5, 1, 0)]  # cut evenly, and not
    leaves = [
        sw.distribute_tensor(x.requires_grad_(), mesh, [sw.Shard(0)], src_data_rank=None) for x in whole
    ]
    with sw.trace() as trace:
        moved = sw.redistribute_many(leaves, {"dp": sw.Replicate()})
    for x, y in zip(whole, moved, strict=True):
        assert y.layout.is_fully_replicated
        assert torch.equal(y.to_local(), x)
    sum(((i + 1) * y.square()).sum() for i, y in enumerate(moved)).backward()
    for i, (leaf, x) in enumerate(zip(leaves, whole, strict=True)):
        assert torch.allclose(leaf.grad.full_tensor(), 2 * (i + 1) * x)
    return len(trace.collectives)


def test_a_list_moves_in_one_collective_per_kind_of_move_with_the_values_and_gradients_of_one_device(
    ranks: Callable[..., list[Any]],
) -> None:
    assert ranks(2, _values_and_gradients) == [2, 2]  # even parts are gathered, uneven ones exchanged


def _placements_per_tensor() -> None:
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    whole = [torch.randn(4, 4), torch.randn(3, 2)]
    given = [sw.distribute_tensor(x, mesh, [sw.Shard(0)], src_data_rank=None) for x in whole]
    first, second = sw.redistribute_many(given, [[sw.Shard(1)], {"dp": sw.Replicate()}])
    assert first.placements == (sw.Shard(1),)
    assert second.placements == (sw.Replicate(),)
    assert torch.equal(first.full_tensor(), whole[0])
    assert torch.equal(second.full_tensor(), whole[1])
    with pytest.raises(ValueError, match="1 placements for 2 tensors"):
        sw.redistribute_many(given, [[sw.Shard(1)]])


def test_each_tensor_may_go_elsewhere_and_a_wrong_count_is_refused(ranks: Callable[..., list[Any]]) -> None:
    ranks(2, _placements_per_tensor)

"""Programs whose answer hangs on what torch's own code asks of a tensor's memory, or of its size."""

import pytest
import torch

import shardwright as sw
from shardwright.errors import RuleError

from .cases import close, full, layouts_of, place


def _local_response() -> None:
    """`CrossMapLRN2d` branches on `Tensor.layout` and writes into views of its own."""
    norm = torch.nn.CrossMapLRN2d(3)
    for layout in layouts_of(4):
        plain = full(2, 5, 3, 4).requires_grad_()
        placed = place(plain.detach(), layout, requires_grad=True)
        wanted, got = norm(plain), norm(placed)
        close(got, wanted.detach(), layout)
        wanted.square().sum().backward()
        got.square().sum().backward()
        close(placed.grad, plain.grad, layout)


def test_cross_map_normalisation_equals_one_device(ranks):
    ranks(2, _local_response)


def _changed_behind() -> None:
    for layout in layouts_of(3):
        plain = full(3, 4, 4)
        placed = place(plain, layout)
        found = []
        for x in (plain.clone(), placed):
            seen = x.expand(2, 3, 4, 4)
            x.transpose_(0, 1)
            x.mul_(2)
            found.append(torch.nn.functional.interpolate(seen, scale_factor=2, mode="bilinear"))
        close(found[1], found[0], layout)


def test_an_expand_is_read_after_its_base_was_transposed(ranks):
    ranks(2, _changed_behind)


def _sizes_and_equality() -> list[bool]:
    """On a mesh of two ranks: the third is outside of it."""
    grid = sw.DeviceMesh("cpu", [0, 1], mesh_dim_names=("some",))
    plain = full(5, 4)
    one = sw.distribute_tensor(plain, grid, [sw.Shard(0)], src_data_rank=None)
    two = sw.distribute_tensor(plain.clone(), grid, [sw.Shard(1)], src_data_rank=None)
    sizes = [plain.is_same_size(one), one.is_same_size(plain), plain[1:].is_same_size(one)]
    assert not torch.equal(one, two[1:])
    if grid.get_coordinate() is None:
        with pytest.raises(RuleError, match="no part of the tensors' mesh"):
            torch.equal(one, one)
        with pytest.raises(RuleError, match="no part of the tensor's mesh"):
            one.sum().item()
        return sizes
    assert abs(one.sum().item() - plain.sum().item()) < 1e-5
    assert torch.equal(one, one.clone())
    assert not torch.equal(one, one + 1)
    return sizes


def test_ranks_outside_the_mesh_know_sizes_and_are_told_that_they_cannot_compare(ranks):
    assert ranks(3, _sizes_and_equality) == [[True, True, False]] * 3

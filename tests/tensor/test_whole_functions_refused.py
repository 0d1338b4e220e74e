"""Functions that are not run as a whole, though each of their ops has a recipe; and writes that fail."""

from __future__ import annotations

import pytest
import torch

import shardwright as sw
from shardwright.tensor import doors

F = torch.nn.functional
assert sw.DTensor  # the package opens its doors when it is first used
pytestmark = pytest.mark.skipif(not doors.uses_extension(), reason=f"known calls: {doors.why_python()}")
_KNOWN = 6


def _cut(full):
    mesh = sw.init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    return sw.distribute_tensor(full, mesh, [sw.Replicate()])


def _renormed():
    ids, weight = _cut(torch.tensor([0, 2])), _cut(torch.full((4, 3), 3.0))
    versions = []
    for _ in range(_KNOWN):
        before = weight._version
        F.embedding(ids, weight, max_norm=1.0)
        versions.append(weight._version - before)
    saved, other = _cut(torch.full((4, 3), 3.0)), _cut(torch.ones(4, 3)).requires_grad_()
    loss = (saved * other).sum()
    F.embedding(ids, saved, max_norm=1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    return versions


def test_a_look_up_that_writes_its_table_says_so_each_time(ranks):
    assert ranks(1, _renormed) == [[1] * _KNOWN]


def _made():
    x = _cut(torch.ones(4, 3))
    found = []
    for _ in range(_KNOWN):
        both = x.new_zeros(4, 3, requires_grad=True), x.new_full((2,), 1.0, requires_grad=True)
        found += [(made.requires_grad, made._local_tensor.requires_grad, made.is_leaf) for made in both]
        with torch.no_grad():
            found.append((x.new_ones(2, requires_grad=True).requires_grad, False, True))
    (x.new_ones(4, 3, requires_grad=True) * x).sum().backward()
    return set(found)


def test_what_is_made_with_a_gradient_has_it_each_time(ranks):
    assert ranks(1, _made) == [{(True, False, True)}]


def _failing():
    x, part = _cut(torch.ones(4, 3)), _cut(torch.ones(2, 3))
    right, wrong = _cut(torch.tensor([0, 1])), _cut(torch.tensor([0, 9]))
    for _ in range(_KNOWN):
        x.index_add_(0, right, part)
    before = x._version
    with pytest.raises((IndexError, RuntimeError)):
        x.index_add_(0, wrong, part)
    return x._version - before


def test_a_write_that_fails_leaves_the_version(ranks):
    assert ranks(1, _failing) == [0]


def _endless():
    x, sizes = _cut(torch.ones(4, 3)), [1]
    sizes.append(sizes)
    for _ in range(3):
        with pytest.raises((RecursionError, TypeError, ValueError)):
            F.pad(x, sizes)


def test_a_list_that_holds_itself_is_an_error(ranks):
    ranks(1, _endless)

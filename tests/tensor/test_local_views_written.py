"""The local part of a view is read again after a write into what it views: an error, as of the whole."""

import pytest
import torch

import shardwright as sw

from .cases import close, mesh

VIEWS = {
    "itself": lambda x: x,
    "all": lambda x: x[...],
    "rows": lambda x: x[1:],
    "a column": lambda x: x[:, 1],
    "turned": lambda x: x.t(),
    "flat": lambda x: x.view(-1),
    "twice": lambda x: x.t()[1:],
    "pairs": lambda x: torch.view_as_complex(x.unflatten(1, (3, 2))),
    "moved nowhere": lambda x: x.redistribute(placements=x.placements) if isinstance(x, sw.DTensor) else x,
}
_X = torch.arange(24.0, dtype=torch.float64).reshape(4, 6)


def _leaf(placement):
    return sw.distribute_tensor(_X, mesh(), [placement]).requires_grad_()


def _memory(x):
    return x.untyped_storage().data_ptr()


def _refused(name):
    for placement in (sw.Replicate(), sw.Shard(0), sw.Shard(1)):
        x = _leaf(placement) * 1
        part = VIEWS[name](x).to_local()
        result = (part * part.conj()).real.sum()
        with torch.no_grad():
            x.mul_(2)
        if not part.numel() or _memory(part) != _memory(x._local_tensor):  # nothing of this rank is written
            continue
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|modified inplace"):
            result.backward()


@pytest.mark.parametrize("name", VIEWS)
def test_what_a_local_part_of_a_view_saved_is_known_to_be_written(ranks, name):
    ranks(2, _refused, name)


def _right(name):
    wanted = _X.clone().requires_grad_()
    (VIEWS[name](wanted * 1).abs() ** 2).sum().backward()
    leaf = _leaf(sw.Replicate())
    view = VIEWS[name](leaf * 1)
    part = view.to_local()
    assert _memory(part) == _memory(view._local_tensor)
    (part.abs() ** 2).sum().backward()
    close(leaf.grad, wanted.grad, name)


@pytest.mark.parametrize("name", VIEWS)
def test_the_local_part_of_a_view_has_the_gradient_of_the_view(ranks, name):
    ranks(2, _right, name)


def _of_an_odd_row():
    row = sw.distribute_tensor(torch.arange(5.0), mesh(), [sw.Replicate()]).requires_grad_()
    part = torch.view_as_complex((row * 1)[:4].view(2, 2)).to_local()
    (part.abs() ** 2).sum().backward()
    close(row.grad, torch.tensor([0.0, 2.0, 4.0, 6.0, 0.0]), "pairs of an odd row")


def test_memory_may_hold_no_whole_number_of_a_views_elements(ranks):
    ranks(2, _of_an_odd_row)

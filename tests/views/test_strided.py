"""`as_strided` sees places of the logical memory; views that change what an element is write through."""

import pytest
import torch

import shardwright as sw
from shardwright.errors import RuleError
from tests.placement.user_placements import PermutedRows
from tests.views.placed import compare, place

PLACEMENTS = [sw.Shard(0), sw.BlockCyclic(1, 1), sw.Ragged((1, 2), (0, 1)), PermutedRows(3)]
# windows of rows, a diagonal, windows that overlap, rows seen twice, columns, nothing
PLACES = [
    ((2, 3), (6, 1), 1),
    ((4,), (7,), None),
    ((5, 4), (3, 1), 2),
    ((2, 2, 3), (0, 6, 1), None),
    ((6, 4), (1, 6), None),
    ((0, 3), (3, 1), None),
]


def _both():
    full = torch.arange(24.0).reshape(4, 6)
    for placement in PLACEMENTS:
        yield full.clone().requires_grad_(), place(full.clone(), [placement], None).detach().requires_grad_()


def _graded():
    with sw.trace() as t:
        for where in PLACES:
            for plain, placed in _both():
                wanted, got = plain.as_strided(*where), torch.as_strided(placed, *where)
                compare("value", got, wanted)
                weight = torch.sin(torch.arange(wanted.numel())).reshape(wanted.shape)
                given = place(weight, sw.layout_of(got).placements, sw.layout_of(got).order_names)
                (grad,) = torch.autograd.grad(got, [placed], given)
                compare("gradient", grad, torch.autograd.grad(wanted, [plain], weight)[0])
    return t.bytes


def test_as_strided_and_its_gradient_move_nothing(ranks):
    assert sum(ranks(2, _graded)) == 0


def _through_memory():
    for plain, placed in _both():
        with torch.no_grad():
            some, part = plain[1:, ::2], placed[1:, ::2]
            assert part.storage_offset() == some.storage_offset() == 6
            for where in [
                ((2, 2), (1, 1)),
                ((3,), (1,), 0),
                ((3,), (6,)),
                ((2,), (2,), some.storage_offset()),
            ]:
                compare("places of the base", part.as_strided(*where), some.as_strided(*where))
            some.as_strided((2, 3), (6, 1), 7).mul_(10)
            part.as_strided((2, 3), (6, 1), 7).mul_(10)
            compare("written through the base", placed + 0, plain)
            compare("seen by another view", part + 0, some)
            part.as_strided((3,), (4,), 9).mul_(-1)
            some.as_strided((3,), (4,), 9).mul_(-1)
            compare("written beside the view", placed + 0, plain)
        with pytest.raises(RuleError, match="leave the elements"):
            part.detach().as_strided((2, 2), (1, 1))


def test_as_strided_of_a_view_sees_the_memory_of_its_base(ranks):
    ranks(2, _through_memory)


def _moved_in_place():
    for each in _both():
        plain, placed = (x.detach() for x in each)
        some, part = plain[1:, ::2], placed[1:, ::2]
        for turned in (some, part):
            turned.as_strided_((2, 3), (6, 1), 1)
        compare("moved to what lies before it", part + 0, some)
        for turned in (some, part):
            turned.mul_(2)
        compare("written where it was moved to", placed + 0, plain)


def test_a_view_is_moved_in_place_within_its_base(ranks):
    ranks(2, _moved_in_place)


def _numbers():
    for placement in [sw.Shard(1), sw.Shard(0), sw.Ragged((2, 3), (0, 1)), PermutedRows(3), sw.Owner(1)]:
        full = torch.arange(10.0).reshape(5, 2)
        placed = place(full.clone(), [placement], None)
        for each in (full, placed):
            torch.view_as_complex(each).mul_(1 + 2j)
        compare("written as complex numbers", placed, full)
        number = torch.view_as_complex(full.clone())
        numbers = place(number.clone(), [sw.Shard(0)], None)
        for each in (number, numbers):
            torch.view_as_real(each)[1:, 1].mul_(3)
            each.conj().imag.add_(1)
        compare("written as real numbers", numbers, number)


def test_complex_and_real_views_are_written_through(ranks):
    ranks(2, _numbers)


def _parts_of_what_was_viewed_otherwise():
    """The same slices were taken of other layouts before: the gradient lies as this base does."""
    found = []
    for placement in [sw.BlockCyclic(0, 1), sw.Interleaved(0, 2), sw.Ragged((1, 2), (0, 1)), sw.Owner(1)]:
        base = place(torch.ones(5, 4), [placement], None).detach().requires_grad_()
        inner = base * 2
        parts = inner.tensor_split([1, 2, 3])
        given = [
            place(torch.ones(p.shape), sw.layout_of(p).placements, sw.layout_of(p).order_names) for p in parts
        ]
        with sw.trace() as t:
            torch.autograd.backward(parts, given)
        compare("gradient", base.grad, torch.full((5, 4), 2.0))
        assert sw.layout_of(base.grad) == sw.layout_of(base)
        found.append(t.bytes)
    return found


def test_gradients_of_parts_lie_as_their_base_does(ranks):
    for moved in ranks(2, _parts_of_what_was_viewed_otherwise):
        assert not any(moved)

"""Views on ranks that hold nothing of what they see: noted as on their peers, so that calls are alike."""

from dataclasses import dataclass

import pytest
import torch

import shardwright as sw
from shardwright.testing import rank_mesh

VIEWS = {
    "conj": lambda x: x.conj(),
    "select": lambda x: x.conj()[0],
    "imag": lambda x: x.conj().imag,
    "slice": lambda x: x.conj()[:, :1],
    "transpose": lambda x: x.conj().t(),
    "reshape": lambda x: x.conj().view(-1),
    "expand": lambda x: x.conj().expand(2, *x.shape),
    "unsqueeze": lambda x: x.conj()[None],
    "diagonal": lambda x: x.conj().diagonal(),
    "part of imag": lambda x: x.conj().imag[0],
    "first of a list": lambda x: x.conj().split(1, 1)[0],
    "of a number": lambda x: x[0, 0].conj(),
    "number of": lambda x: x.conj()[0, 0],
}
PLACED = {"owner": (sw.Owner(1), (3, 2)), "one row": (sw.Shard(0), (1, 2))}


def _noted(name, placed):
    placement, shape = PLACED[placed]
    whole = torch.arange(2.0 * shape[0]).view(shape) * (1 + 2j)
    mesh = rank_mesh((2,), ("tp",))
    x, wanted = sw.distribute_tensor(whole, mesh, [placement]), VIEWS[name](whole)
    view = VIEWS[name](x)
    assert torch.equal(view.full_tensor(), wanted)
    out = sw.distribute_tensor(torch.zeros_like(wanted), mesh, [sw.Owner(0)])
    torch.add(view, view, out=out)  # torch carries out first what is noted of each operand
    assert torch.equal(out.full_tensor(), wanted + wanted)
    return view.is_conj(), view.is_neg()


@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize("name", VIEWS)
def test_what_is_noted_of_elements_is_noted_everywhere(ranks, name, placed):
    first, second = ranks(2, _noted, name, placed)
    assert first == second


@dataclass(frozen=True)
class Last(sw.Partition):
    """Everything on the last coord."""

    def region(self, shape, n, coord):
        if coord < n - 1:
            return sw.Region([], (0, *shape[1:]))
        return sw.Region([sw.Box((0,) * len(shape), shape)], shape)


NUMBERS = {
    "expand": lambda x: x.expand(4, 2),
    "view": lambda x: x.view(1),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "index": lambda x: x[None],
    "nothing": lambda x: x.expand(0, 3),
    "broadcast": lambda x: x.broadcast_to(3) * 2,
    "stack": lambda x: torch.stack([x, x]),
}


def _of_a_number(name):
    mesh = rank_mesh((2,), ("tp",))
    number = torch.tensor(3.0)
    x = sw.distribute_tensor(number, mesh, [Last()])
    assert torch.equal(NUMBERS[name](x).full_tensor(), NUMBERS[name](number))
    rows = sw.distribute_tensor(torch.ones(4, 2), mesh, [sw.Shard(0)]).requires_grad_()
    rows.sum().backward(x)
    assert torch.equal(rows.grad.full_tensor(), torch.full((4, 2), 3.0))


@pytest.mark.parametrize("name", NUMBERS)
def test_views_of_a_number_under_a_placement_of_the_users(ranks, name):
    ranks(2, _of_a_number, name)

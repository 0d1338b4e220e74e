"""Where a view and its gradient lie does not depend on what was viewed before."""

import torch

import shardwright as sw
from tests.views.placed import place

SHAPE = (6, 4, 5)
PROGRAMS = {
    "slice with steps": lambda x: x[::2, 1:, ::3].softmax(0),
    "diagonal": lambda x: x.diagonal(0, 0, 1).softmax(0),
    "chunk": lambda x: x.chunk(4, 0)[1].softmax(0),
    "as_strided": lambda x: x.as_strided((3, 4), (40, 1), 2),
}
PLACEMENTS = (
    sw.Ragged((1, 2), (0, 2)),
    sw.Interleaved(2, 2),
    sw.Ragged((1, 2), (0,)),
    sw.Owner(0),
    sw.Shard(1),
    sw.Shard(2),
)


def _lie(program, placement):
    x = place(torch.arange(120.0).view(SHAPE), [placement], None).detach().requires_grad_()
    out = program(x * 1)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    return str(sw.layout_of(out)), str(sw.layout_of(gradient))


def _of_all(placements):
    return {(name, str(p)): _lie(program, p) for name, program in PROGRAMS.items() for p in placements}


def _twice():
    """As they come in a fresh process, each alone; and when views of all other layouts were taken before."""
    return _of_all(PLACEMENTS), _of_all(PLACEMENTS[::-1])


def test_programs_give_the_same_layouts_whatever_was_viewed_before(ranks):
    fresh = {}
    for placement in PLACEMENTS:
        fresh |= ranks(2, _of_all, [placement], fresh=True)[0]
    for first, second in ranks(2, _twice, fresh=True):
        assert first == second == fresh

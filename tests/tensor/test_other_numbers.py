"""A number that was not seen before decides nothing anew, unless it decides something."""

import torch
from torch.nn import functional

import shardwright as sw
from shardwright.tensor.dispatch import call
from shardwright.testing.meshes import rank_mesh

from .cases import close

_X = torch.arange(12.0).view(3, 4) - 5.5
_OPS = {
    "product": lambda x, v: x * v,
    "sum": lambda x, v: torch.add(x, x, alpha=v),
    "in place": lambda x, v: x.clone().mul_(v),
    "power": lambda x, v: x.abs() ** v,
    "bounds": lambda x, v: x.clamp(min=-v, max=v),
    "activation": functional.elu,
    "between": lambda x, v: torch.lerp(x, x + 1, v),
}


def _decisions():
    """How many calls with a new number were decided, by op; every value compared."""
    decide, made = call.decide, []

    def counted(*args, **kwargs):
        made.append(args[0].func)
        return decide(*args, **kwargs)

    found = {}
    call.decide = counted
    try:
        for name, op in _OPS.items():
            x = sw.distribute_tensor(_X, rank_mesh((2,), ("tp",)), [sw.Shard(0)])
            op(x, 1.5)
            made.clear()
            for number in (2.5, 0.25, 3.0):
                close(op(x, number), op(_X, number))
            found[name] = len(made)
    finally:
        call.decide = decide
    return found


def test_a_new_number_is_not_decided(ranks):
    assert ranks(2, _decisions) == [dict.fromkeys(_OPS, 0)] * 2


def _numbers_that_decide():
    """What is filled with zeros may stay pending; filled with anything else it has to be finished."""
    mesh = rank_mesh((2,), ("tp",))
    mask = sw.distribute_tensor(_X > 0, mesh, [sw.Replicate()])
    for value in (0.0, 1.0, 0.0, 2.0):
        x = sw.distribute_tensor(torch.stack([_X, _X]), mesh, [sw.Shard(0)]).sum(0)
        assert x.placements[0].is_pending
        close(x.masked_fill(mask, value), (2 * _X).masked_fill(_X > 0, value))


def test_numbers_of_pending_values_decide(ranks):
    ranks(2, _numbers_that_decide)


def _classes():
    """A whole number and a fraction give other dtypes."""
    x = sw.distribute_tensor(torch.arange(6), rank_mesh((2,), ("tp",)), [sw.Shard(0)])
    for number in (2, 0.5, 3, 1.5, True, 2 + 1j):
        made = x * number
        assert made.dtype == (torch.arange(6) * number).dtype
        close(made, torch.arange(6) * number)


def test_classes_of_numbers_decide(ranks):
    ranks(2, _classes)


def _numbers_without_end():
    """Terms of either sign, times infinity, would not add up: the value is finished first."""
    x = sw.distribute_tensor(torch.stack([_X, 1 - _X]), rank_mesh((2,), ("tp",)), [sw.Shard(0)])
    whole = torch.stack([_X, 1 - _X])
    for op in (
        lambda v: v * torch.inf,
        lambda v: v / 0.0,
        lambda v: v.clone().mul_(-torch.inf),
        lambda v: v / torch.inf,
        lambda v: torch._foreach_mul([v, v], torch.inf)[1],
        lambda v: torch._foreach_div([v], [0.0])[0],
        lambda v: v * 2.0,
    ):
        value = x.sum(0)
        assert value.placements[0].is_pending
        torch.testing.assert_close(op(value).full_tensor(), op(whole.sum(0)))


def test_terms_meet_no_infinity(ranks):
    ranks(2, _numbers_without_end)

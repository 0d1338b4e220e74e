"""Collectives on plain tensors record nothing: their gradients are the business of who calls them."""

import torch
import torch.distributed as dist

from shardwright.comm import functional


def _recorded():
    group = dist.group.WORLD
    x = torch.arange(4.0).requires_grad_()
    made = {
        "exchange": functional.exchange_rows(x, [2, 2], [2, 2], group),
        "gather": functional.gather_rows(x, [4, 4], group),
        "sum": functional.reduce_over(x, "sum", group),
        "sum in place": functional.start_sum(x.detach().clone(), group)(),
    }
    first = dist.get_rank() * 2
    part = x.detach()[first : first + 2]
    right = {"exchange": part.repeat(2), "gather": x.detach().repeat(2)}
    for name, found in made.items():
        torch.testing.assert_close(found.detach(), right.get(name, x.detach() * 2), msg=name)
    return {name for name, found in made.items() if found.requires_grad}


def test_collectives_record_nothing(ranks):
    assert ranks(2, _recorded) == [set(), set()]

"""Wrong uses of the public names, on real ranks."""

from __future__ import annotations

import torch

import shardwright as sw
from shardwright.errors import ShardwrightError
from shardwright.testing import rank_mesh


class NoTarget(sw.Pending):
    """A reduction that nothing can be made a term of."""

    can_be_target = False

    def combine(self, terms):
        return torch.stack(list(terms)).sum(0)


def _uses(mesh, x):
    """Name of a wrong use, and the use."""
    shard, rep, local = sw.Shard(0), sw.Replicate(), torch.zeros(2, 4)
    placed = sw.distribute_tensor(x, mesh, {"dp": shard})
    both = sw.DTensor.from_local(x, mesh, [sw.Partial("sum"), sw.Partial("max")])
    swapped = sw.DTensor.from_local(x, mesh, [sw.Partial("max"), sw.Partial("sum")])
    hidden = sw.DTensor.from_local(x, mesh, [sw.Partial("sum"), NoTarget()])
    return {
        "dim, distribute": lambda: sw.distribute_tensor(x, mesh, [sw.Shard(2), rep]),
        "dim, redistribute": lambda: placed.redistribute({"dp": sw.Shard(-3)}),
        "dim, from_local": lambda: sw.DTensor.from_local(local, mesh, [sw.Shard(5), rep]),
        "dim, zeros": lambda: sw.zeros(4, 4, device_mesh=mesh, placements=[sw.ZigZag(7), rep]),
        "units, distribute": lambda: sw.distribute_tensor(x, mesh, {"dp": sw.Ragged((1, 2, 3))}),
        "units, redistribute": lambda: placed.redistribute({"tp": sw.Ragged((1,))}),
        "coord": lambda: placed.redistribute({"dp": sw.Owner(2)}),
        "length, distribute": lambda: sw.distribute_tensor(x, mesh, [shard]),
        "length, redistribute": lambda: placed.redistribute(mesh, [shard, shard, shard]),
        "length, from_local": lambda: sw.DTensor.from_local(local, mesh, [shard]),
        "axis, distribute": lambda: sw.distribute_tensor(x, mesh, {"pp": shard}),
        "axis, redistribute": lambda: placed.redistribute({"pp": shard}),
        "axis, rand": lambda: sw.rand(4, 4, device_mesh=mesh, placements={"pp": shard}),
        "no placement": lambda: placed.redistribute(["Shard(0)", rep]),
        "swap, in an op": lambda: _explicitly(lambda: both + swapped),
        "swap, beside a maximum": lambda: _explicitly(lambda: both + both),
        "swap, no way back": lambda: hidden.redistribute({"dp": rep}),
    }


def _explicitly(op):
    with sw.explicit():
        return op()


def refused(name):
    """The class and the text of the error of one wrong use."""
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    try:
        _uses(mesh, torch.ones(4, 4))[name]()
    except ShardwrightError as error:
        return f"{type(error).__name__} {error}"
    return "nothing was refused"


def swapped_values():
    """Where two pendings can be combined and made anew, an op gives the value of one device."""
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    rank = torch.distributed.get_rank()
    terms = torch.full((3, 2), float(rank))  # the value: max over tp of each dp, summed: 1 + 3
    both = sw.DTensor.from_local(terms, mesh, [sw.Partial("sum"), sw.Partial("max")])
    swapped = sw.DTensor.from_local(terms, mesh, [sw.Partial("max"), sw.Partial("sum")])  # max(0 + 1, 2 + 3)
    half = both.redistribute({"dp": sw.Replicate()})
    turned = both.redistribute([sw.Partial("max"), sw.Partial("sum")])
    found = (both, swapped, half, turned, both + swapped, both + both, both.relu(), both.amax(0))
    return [value.full_tensor().unique().tolist() for value in found]

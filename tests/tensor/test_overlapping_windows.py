"""Writes through windows that overlap, where the dim is cut: the base and every other window get them."""

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from shardwright.errors import RuleError
from tests.tiers import one_in

from .cases import close, place

aten = torch.ops.aten


def _windows(x):
    return x.unfold(0, 2, 1)


# Every way to hand the same elements on; two windows are taken, to see that each has the write of the other.
CHAINS = {
    "windows": lambda w: w,
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "alias": aten.alias,
    "view_as": lambda w: w.view_as(w),
    "lift_fresh": aten.lift_fresh,
    "transposed, detached": lambda w: w.transpose(1, 2).detach(),
    "detached twice, a slice": lambda w: w.detach()[1:6].data,
    "every other, detached": lambda w: w[::2].detach(),
}

WRITES = {
    "fill_": lambda w: w.fill_(7.0),
    "zero_": lambda w: w.zero_(),
    "copy_ a number": lambda w: w.copy_(torch.tensor(2.0)),
    "masked_fill_": lambda w: w.masked_fill_(w > 9, -0.0),
    "relu_": lambda w: w.relu_(),
    "abs_ of a list": lambda w: torch._foreach_abs_([w]),
    "minimum_ of a list": lambda w: torch._foreach_minimum_([w], 0.5),
    "an item": lambda w: w.__setitem__(0, 5.0),
    "an item at the seam": lambda w: w.__setitem__(w.shape[0] // 2, 5.0),
    "an element": lambda w: w.__setitem__((1, 1, 1), float("nan")),
    "an item times": lambda w: w[1].mul_(3),
    "a detached item plus": lambda w: w[2].detach().add_(4),
    "an item's data": lambda w: w[2].data.mul_(-2),
    "items by index": lambda w: w.__setitem__([0, 2], 5.0),
}

LAYOUTS = ((sw.Shard(0),), (sw.ZigZag(0),), (sw.Shard(1),), (sw.Replicate(),))


def _base():
    x = torch.arange(-8.0, 24.0).view(8, 4)
    x[3, 1] = float("nan")
    return x


def _nan_close(got, wanted, where):
    close(torch.nan_to_num(got, nan=99.0), torch.nan_to_num(wanted, nan=99.0), where)


def _written(chain, mode):
    for name, write in WRITES.items():
        for layout in LAYOUTS:
            where = f"{chain}, {name}, {layout}, {mode.__name__}"
            plain, d = _base(), place(_base(), layout)
            with mode():
                for_plain, for_d = _windows(plain), _windows(d)
                besides_plain, besides = plain[1::2], d[1::2]
                one, two = CHAINS[chain](for_plain), CHAINS[chain](for_d)
                write(one)
                write(two)
                _nan_close(d, plain, f"{where}: the base")
                _nan_close(two, one, f"{where}: what was written")
                _nan_close(for_d, for_plain, f"{where}: the windows")
                _nan_close(besides, besides_plain, f"{where}: a view beside")


@pytest.mark.parametrize("chain", one_in(3, CHAINS))
def test_a_write_through_overlapping_windows_reaches_base_and_windows(ranks, chain):
    ranks(2, _written, chain, torch.no_grad)
    if chain in {"windows", "detach"}:
        ranks(2, _written, chain, torch.enable_grad)
        ranks(2, _written, chain, torch.inference_mode)


MANY_TIMES = {
    "mul_": lambda w: w.mul_(2),
    "add_": lambda w: w.add_(torch.ones(())),
    "copy_": lambda w: w.copy_(w.clone()),
    "cumsum_": lambda w: w.cumsum_(0),
    "normal_": lambda w: w.normal_(),
    "index_put_": lambda w: w.index_put_((torch.tensor([0]),), torch.tensor(1.0), accumulate=True),
}


def _refused():
    for name, write in MANY_TIMES.items():
        for layout in LAYOUTS[:2]:
            for chain in ("windows", "detach", "data", "transposed, detached"):
                d = place(_base(), layout)
                try:
                    write(CHAINS[chain](_windows(d)))
                except RuleError as error:
                    said = str(error)
                else:
                    said = "nothing"
                everyone = [None] * dist.get_world_size()
                dist.all_gather_object(everyone, said)
                assert len(set(everyone)) == 1, f"{name}, {layout}: {everyone}"
                assert "windows that overlap" in said, f"{name}, {layout}, {chain}: {said}"
                _nan_close(d, _base(), f"{name}, {layout}, {chain}: nothing changed")


def test_a_write_whose_order_matters_is_refused_on_every_rank(ranks):
    ranks(2, _refused)


def _where_the_windows_are_whole():
    """Nothing is copied where no rank lacks a part of a window's elements: all is as on one device."""
    for name in ("mul_", "add_"):
        for layout in LAYOUTS[2:]:
            plain, d = _base(), place(_base(), layout)
            MANY_TIMES[name](_windows(plain).detach())
            MANY_TIMES[name](_windows(d).detach())
            _nan_close(d, plain, f"{name}, {layout}")


def test_a_dim_that_is_not_cut_is_written_as_on_one_device(ranks):
    ranks(2, _where_the_windows_are_whole)

"""What an op makes anew on one device is nobody else's memory here, whatever steps it is taken in."""

import torch
from torch.nn import functional

import shardwright as sw

from .cases import close, full, place

MADE_ANEW = {
    "as many groups as channels": lambda x: functional.channel_shuffle(x, 4),
    "one group": lambda x: functional.channel_shuffle(x, 1),
    "shuffled": lambda x: functional.channel_shuffle(x, 2),
    "no dropout": lambda x: torch.ops.aten.native_dropout(x, 0.0, True)[0],
    "not padded": lambda x: functional.pad(x, (0, 0)),
    "no average": lambda x: functional.avg_pool2d(x, 1),
    "mean of one": lambda x: x[:, :1].mean(1, keepdim=True),
    "rounded": lambda x: torch.round(x, decimals=3),
    "no shift": lambda x: torch.roll(x, 0, 0),
    "same size": lambda x: functional.interpolate(x, scale_factor=1),
}


def _writes_stay_apart():
    for name, make in MADE_ANEW.items():
        for cut in (sw.Shard(0), sw.Shard(1), sw.Shard(2), sw.Replicate()):
            plain = full(2, 4, 3, 5)
            ours = place(plain, (cut,))
            wanted, got = make(plain), make(ours)
            close(got, wanted, f"{name} {cut}")
            wanted.fill_(7)
            got.fill_(7)
            close(ours, plain, f"{name} {cut}: what the operand holds after a write into the result")


def test_a_write_into_a_new_result_stays_there(ranks):
    ranks(2, _writes_stay_apart)


def _written_results():
    """What comes of a weight is written in place, and its gradient is that of one device."""
    for cut in (sw.Shard(0), sw.Shard(1), sw.Replicate()):
        plain = full(4, 3), full(2, 3, 3, seed=1).requires_grad_()
        ours = place(plain[0], (sw.Replicate(),)), place(plain[1].detach(), (cut,), requires_grad=True)
        for x, weight in (plain, ours):
            out = functional.relu(functional.bilinear(x, x, weight), inplace=True)
            out.square().sum().backward()
        close(ours[1].grad, plain[1].grad, f"{cut}")


def test_what_is_made_in_steps_is_written_in_place(ranks):
    ranks(2, _written_results)


def _nobodys_view():
    """A result of steps is no view of what was made on the way, with a gradient and without."""
    op = torch.ops.aten._trilinear.default
    x, weight = full(4, 3), full(2, 3, 3, seed=1)
    dims = [1, 3], [0], [1, 2], [2, 3]
    for grad in (True, False):
        d, w = place(x, (sw.Shard(0),)), place(weight, (sw.Shard(0),), requires_grad=grad)
        out = op(d, w, d, *dims)
        close(out, op(x, weight, x, *dims))
        assert not out._is_view()


def test_a_new_result_is_nobodys_view(ranks):
    ranks(2, _nobodys_view)

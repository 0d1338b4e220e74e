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

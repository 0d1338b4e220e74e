"""What one device refuses for the memory that it would write, every rank refuses; what it takes, all take."""

import torch

import shardwright as sw

from .cases import close, place


def _mask(x):
    return x > 0.5


def _zeros(x):
    return torch.zeros_like(x, dtype=torch.int64)


def _rows(x):
    return torch.zeros_like(x[:, 0], dtype=torch.int64)


WRITES = {
    "fill_": lambda x, y: x.fill_(1),
    "zero_": lambda x, y: x.zero_(),
    "copy_": lambda x, y: x.copy_(y),
    "add_": lambda x, y: x.add_(y),
    "log1p_": lambda x, y: x.log1p_(),
    "clamp_": lambda x, y: x.clamp_(0, 1),
    "masked_fill_": lambda x, y: x.masked_fill_(_mask(y), 1),
    "masked_scatter_": lambda x, y: x.masked_scatter_(_mask(y), y.clone()),
    "index_fill_": lambda x, y: x.index_fill_(0, _rows(y), 1),
    "index_add_": lambda x, y: x.index_add_(0, _rows(y), y),
    "index_copy_": lambda x, y: x.index_copy_(0, _rows(y)[:1], y[:1]),
    "scatter_": lambda x, y: x.scatter_(0, _zeros(y)[:1], y),
    "scatter_ 1": lambda x, y: x.scatter_(0, _zeros(y), 1),
    "scatter_add_": lambda x, y: x.scatter_add_(0, _zeros(y), y),
    "scatter_reduce_": lambda x, y: x.scatter_reduce_(0, _zeros(y), y, "amax"),
    "index_put_": lambda x, y: x.index_put_((_rows(y)[:1],), y[:1]),
    "tril_": lambda x, y: x.tril_(),
    "cumsum_": lambda x, y: x.cumsum_(0),
    "lerp_": lambda x, y: x.lerp_(y, 0.5),
    "addcmul_": lambda x, y: x.addcmul_(y, y),
    "pow_": lambda x, y: x.pow_(2),
    "addmm_": lambda x, y: x.addmm_(y, torch.ones_like(y[:1]).T.expand(-1, y.shape[1]).clone().expand(3, 3)),
}
# torch warns that it will not take the first three any more; of tril_ it does not say which value stays.
NO_PROMISE = {(name, "expanded") for name in ("masked_fill_", "index_fill_", "index_put_", "tril_")}
# Its product is written while it is read: what one device gives is what its library left.
NO_PROMISE |= {("addmm_", "the same"), ("addmm_", "partly the same")}
WAYS = {
    "apart": lambda x, other: (x[1:], other[1:]),
    "the same": lambda x, other: (x[1:], x[1:]),
    "partly the same": lambda x, other: (x[1:], x[:-1]),
    "side by side": lambda x, other: (x[:2], x[2:]),
    "expanded": lambda x, other: (x[:1].expand(3, 3), other[:3].clone()),
}


def _refused(write, way, x, other):
    try:
        with torch.no_grad():
            write(*way(x, other))
    except RuntimeError as error:
        return "unsupported operation" in str(error) or repr(error)
    return False


def _as_on_one_device():
    generator = torch.Generator().manual_seed(0)
    x, other = torch.rand(2, 4, 3, generator=generator, dtype=torch.float64)
    for name, write in WRITES.items():
        for how, way in WAYS.items():
            if (name, how) in NO_PROMISE:
                continue
            plain = [x.clone(), other.clone()]
            wanted = _refused(write, way, *plain)
            for cut in (sw.Shard(0), sw.Shard(1), sw.Owner(1)):
                ours = [place(x, (cut,)), place(other, (cut,))]
                got = _refused(write, way, *ours)
                assert got == wanted, f"{name}, {how}, {cut}: {got} for {wanted}"
                if not wanted:
                    close(ours[0], plain[0], f"{name}, {how}, {cut}")


def _a_mask_of_itself():
    x = torch.tensor([True, False, True, False])
    for cut in (sw.Shard(0), sw.Replicate()):
        ours = place(x.clone(), (cut,))
        ours[ours] = False
        assert not ours.any()


def test_a_tensor_may_be_the_mask_of_a_write_into_itself(ranks):
    ranks(2, _a_mask_of_itself)


def test_writes_that_one_device_refuses_for_their_memory_are_refused_on_every_rank(ranks):
    ranks(2, _as_on_one_device, timeout=240)

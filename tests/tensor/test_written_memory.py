"""What one device refuses for the memory that it would write, every rank refuses; what it takes, all take."""

import warnings

import pytest
import torch

import shardwright as sw
from tests.tiers import only

from .cases import close, mesh, place


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
    "copysign_": lambda x, y: x.copysign_(y),
    "eq_": lambda x, y: x.eq_(y),
    "floor_divide_": lambda x, y: x.floor_divide_(y + 1),
    "index_reduce_": lambda x, y: x.index_reduce_(0, _rows(y), y, "amin"),
    "put_": lambda x, y: x.put_(_zeros(y), y),
    "put_, added": lambda x, y: x.put_(_zeros(y), y, accumulate=True),
    "addr_": lambda x, y: x.addr_(y[:, 0], y[0]),
    "threshold_": lambda x, y: torch.threshold_(x, 0.5, 1.0),
    "ldexp_": lambda x, y: x.ldexp_(y),
    "copy_, transposed": lambda x, y: x.T.copy_(y.T),
    "index_put_, added": lambda x, y: x.index_put_((_rows(y),), y, accumulate=True),
    "renorm_": lambda x, y: x.renorm_(2, 0, 0.5),
    "renorm": lambda x, y: torch.renorm(y, 2, 0, 0.5, out=x),
    "cumsum": lambda x, y: torch.cumsum(y, 0, out=x),
    "cumprod": lambda x, y: torch.cumprod(y, 0, out=x),
    "logcumsumexp": lambda x, y: torch.logcumsumexp(y, 0, out=x),
    "take": lambda x, y: torch.take(y, _zeros(y), out=x),
    "gather": lambda x, y: torch.gather(y, 0, _zeros(y), out=x),
    "index_select": lambda x, y: torch.index_select(y, 0, _rows(y), out=x),
    "stack": lambda x, y: torch.stack(list(y), out=x),
    "cat": lambda x, y: torch.cat([y[:1], y[1:]], out=x),
    "exp": lambda x, y: torch.exp(y, out=x),
    "scatter": lambda x, y: torch.scatter(y, 0, _zeros(y)[:1], y.clone(), out=x),
    "scatter of it": lambda x, y: torch.scatter(y.clone(), 0, _zeros(y)[:1], y, out=x),
    "scatter 1": lambda x, y: torch.scatter(y, 0, _zeros(y), 1, out=x),
    "scatter_add": lambda x, y: torch.scatter_add(y, 0, _zeros(y), y.clone(), out=x),
    "scatter_reduce": lambda x, y: torch.scatter_reduce(y, 0, _zeros(y), y.clone(), "amax", out=x),
    "index_add": lambda x, y: torch.index_add(y, 0, _rows(y), y.clone(), out=x),
    "index_copy": lambda x, y: torch.index_copy(y, 0, _rows(y)[:1], y[:1].clone(), out=x),
    "index_reduce": lambda x, y: torch.index_reduce(y, 0, _rows(y), y.clone(), "amin", out=x),
    "index_fill": lambda x, y: torch.ops.aten.index_fill.int_Scalar_out(y, 0, _rows(y), 1, out=x),
    "index_put": lambda x, y: torch.ops.aten.index_put.out(y, (_rows(y)[:1],), y[:1], out=x),
    "masked_scatter": lambda x, y: torch.ops.aten.masked_scatter.out(y, _mask(y), y, out=x),
    "put": lambda x, y: torch.ops.aten.put.out(y, _zeros(y), y, out=x),
    "add": lambda x, y: torch.ops.aten.add.Scalar_out(y, 1, 1, out=x),
    "addmm_": lambda x, y: x.addmm_(y, torch.ones_like(y[:1]).T.expand(-1, y.shape[1]).clone().expand(3, 3)),
}
# torch warns that it will not take the first three any more; of tril_ it does not say which value stays.
NO_PROMISE = {
    (name, how)
    for name in ("masked_fill_", "index_fill_", "index_put_", "tril_")
    for how in ("expanded", "expanded, of itself")
}
# Which of several values stays in one place is not said.
NO_PROMISE |= {("index_put_, added", how) for how in ("expanded", "expanded, of itself")}
# Their products are written while they are read: what one device gives is what its library left.
NO_PROMISE |= {
    (name, how) for name in ("addmm_", "addr_") for how in ("the same", "partly the same", "crossing")
}
WAYS = {
    "apart": lambda x, other: (x[1:], other[1:]),
    "the same": lambda x, other: (x[1:], x[1:]),
    "partly the same": lambda x, other: (x[1:], x[:-1]),
    "side by side": lambda x, other: (x[:2], x[2:]),
    "expanded": lambda x, other: (x[:1].expand(3, 3), other[:3].clone()),
    "expanded, of itself": lambda x, other: (x[:1].expand(3, 3),) * 2,
    # With gaps on one device; what a rank has of them is one place, by other strides.
    "crossing": lambda x, other: (x[::3, 1:2], x[::2, 1:2]),
}


def _refused(write, way, *given):
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):  # of ops that torch calls new
            write(*way(*given))
    except RuntimeError as error:
        return "unsupported operation" in str(error) or repr(error)
    return False


def _as_on_one_device(part):
    generator = torch.Generator().manual_seed(0)
    x, other = torch.rand(2, 4, 3, generator=generator, dtype=torch.float64)
    for name, write in list(WRITES.items())[part::3]:
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


# Taken, although elements are one place: by a number each of them gets, or each that is added to it.
REPEATED = {
    "index_fill_": lambda x, i, m: x.index_fill_(0, i, 5.0),
    "index_fill_, none": lambda x, i, m: x.index_fill_(1, i[:0], 5.0),
    "masked_fill_": lambda x, i, m: x.masked_fill_(m, 5.0),
    "rows": lambda x, i, m: x.__setitem__(i, 5.0),
    "added": lambda x, i, m: x.index_put_((i,), torch.ones_like(x[0, 0]), accumulate=True),
    "a row": lambda x, i, m: x.__setitem__(1, 5.0),  # refused
}


def _repeated_as_on_one_device():
    index, mask = torch.tensor([1, 2]), torch.arange(12).view(4, 3) % 4 == 1
    whole = place(index, (sw.Replicate(),)), place(mask, (sw.Replicate(),))
    for first in (torch.arange(1.0, 5.0).view(4, 1), torch.arange(1.0, 4.0).view(1, 3)):
        for name, write in REPEATED.items():
            plain = first.clone()
            wanted = _refused(write, lambda x, *given: (x.expand(4, 3), *given), plain, index, mask)
            for cut in (sw.Shard(0), sw.Shard(1), sw.Partial("sum")):
                ours = place(first, (cut,))
                got = _refused(write, lambda x, *given: (x.expand(4, 3), *given), ours, *whole)
                assert got == wanted, f"{name}, {cut}: {got} for {wanted}"
                close(ours, plain, f"{name}, {cut}")


def test_writes_into_repeated_elements_do_what_they_do_on_one_device(ranks):
    ranks(2, _repeated_as_on_one_device)


# What does not go into the written tensor; without data, torch takes many of them.
_WIDE, _WHOLE = torch.ones(3, 2, 4), torch.ones(2, 4, dtype=torch.int64)
UNFIT = {
    name: (lambda x, y, name=name: getattr(x, name)(y), torch.full((2, 1), 2.0), _WIDE)
    for name in ("copysign_", "eq_", "ge_", "floor_divide_", "heaviside_", "xlogy_", "add_", "nextafter_")
}
UNFIT |= {
    f"{name} of integers": (lambda x, y, name=name: getattr(x, name)(y), _WHOLE, torch.ones(2, 4))
    for name in ("mul_", "floor_divide_", "add_", "ldexp_", "copysign_", "fmod_")
}
UNFIT |= {
    "gcd_": (lambda x, y: x.gcd_(y), _WHOLE[:, :1], _WIDE.long()),
    "addcmul_": (lambda x, y: x.addcmul_(y, y), _WHOLE, torch.ones(2, 4)),
    "logit_": (lambda x, y: x.logit_(), _WHOLE, torch.ones(2, 4)),
}


def _unfit_as_on_one_device():
    """Every rank refuses, one that holds nothing too, and nothing has changed."""
    for name, (write, x, y) in UNFIT.items():
        with pytest.raises(RuntimeError):
            write(x.clone(), y.clone())
        for cut in (sw.Shard(0), sw.Owner(1), sw.Replicate()):
            ours = [place(x.clone(), (cut,)), place(y, (cut,))]
            with pytest.raises(RuntimeError, match=r"doesn't match|can't be cast"):
                write(*ours)
            close(ours[0], x, f"{name}, {cut}")


def test_what_does_not_fit_into_the_written_tensor_is_refused_on_every_rank(ranks):
    ranks(2, _unfit_as_on_one_device)


def _a_mask_of_itself():
    x = torch.tensor([True, False, True, False])
    for cut in (sw.Shard(0), sw.Replicate()):
        ours = place(x.clone(), (cut,))
        ours[ours] = False
        assert not ours.any()


def test_a_tensor_may_be_the_mask_of_a_write_into_itself(ranks):
    ranks(2, _a_mask_of_itself)


@pytest.mark.parametrize("part", only([0], range(3)))
def test_writes_that_one_device_refuses_for_their_memory_are_refused_on_every_rank(ranks, part):
    ranks(2, _as_on_one_device, part, timeout=240)


# The write, and the same into new memory: what a kernel reads of what it wrote differs between processors.
ONTO_A_FACTOR = {
    "addmm_": (lambda x, y: x.addmm_(x, y), lambda x, y: torch.addmm(x, x, y)),
    "mm": (lambda x, y: torch.mm(x, y, out=x), torch.mm),
    "addmm": (lambda x, y: torch.addmm(x, x, y, out=x), lambda x, y: torch.addmm(x, x, y)),
}


def _products_onto_a_factor():
    draw = torch.Generator().manual_seed(0)
    full, square = torch.randn(2, 5, generator=draw), torch.randn(5, 5, generator=draw)
    for name, (write, apart) in ONTO_A_FACTOR.items():
        for placement in (sw.Shard(0), sw.Replicate()):
            x, y = place(full.clone(), (placement,)), place(square, (sw.Replicate(),))
            expected = apart(full, square)
            write(x, y)
            torch.testing.assert_close(x.full_tensor(), expected, msg=lambda text, n=name: f"{n}: {text}")


def test_a_product_is_written_onto_its_factor(ranks):
    ranks(2, _products_onto_a_factor)


def _nothing_is_written_twice():
    """Without elements no two are one place, whatever the strides are."""
    for write in ("round_", "zero_", "sin_", "exponential_"):
        for cut in (sw.Shard(0), sw.Shard(1), sw.Replicate()):
            ours = place(torch.ones(2, 0), (cut,)).expand(3, -1, -1)
            assert getattr(torch.ones(2, 0).expand(3, -1, -1), write)().shape == (3, 2, 0)
            assert getattr(ours, write)().shape == (3, 2, 0)
            found = place(torch.zeros(2, 0, dtype=torch.bool), (cut,)).nonzero()
            assert found.add_(1).shape == (0, 2)


def _without_elements_onto_itself():
    """torch looks for the same tensor before it counts elements."""
    index = torch.arange(3)
    for cut in (sw.Shard(0), sw.Shard(1), sw.Shard(2), sw.Replicate()):
        ours = place(torch.ones(0, 1, 3), (cut,))
        for x in (torch.ones(0, 1, 3), ours):
            with pytest.raises(RuntimeError, match="single memory location"):
                x.index_copy_(2, index if x is not ours else place(index, (sw.Replicate(),)), x)


def test_a_tensor_without_elements_is_refused_as_its_own_source_as_on_one_device(ranks):
    ranks(2, _without_elements_onto_itself)


def test_what_has_no_elements_is_written_as_on_one_device(ranks):
    ranks(2, _nothing_is_written_twice)


def _constants_reach_expanded_pending_values():
    for placement in (sw.Partial(), sw.Partial("product"), sw.Partial("max"), sw.Shard(0), sw.Replicate()):
        x = sw.distribute_tensor(torch.arange(4.0).view(1, 4, 1), mesh(), (placement,))
        x.expand(2, -1, 3).fill_(3)
        close(x, torch.full((1, 4, 1), 3.0), str(placement))
        x = sw.distribute_tensor(torch.arange(4.0), mesh(), (placement,))
        x.expand(2, -1).zero_()
        close(x, torch.zeros(4), str(placement))


def test_a_constant_reaches_every_element_of_an_expanded_pending_value(ranks):
    ranks(2, _constants_reach_expanded_pending_values)

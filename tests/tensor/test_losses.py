"""Losses of a sharded batch: the mean is that of one device, in value and gradient, never a mean of means."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwright as sw
from shardwright.testing.meshes import rank_mesh
from tests.tiers import only

from .cases import check_op, close, full, layouts_of, mesh, place


def _logits(rows):
    return full(rows, 5), torch.randint(5, (rows,), generator=torch.Generator().manual_seed(4))


def _mean_loss(rows):
    """A mean over a batch that the ranks share, evenly, unevenly, or with ranks that have nothing."""
    x, target = full(rows, 4), full(rows, 3, seed=1)
    plain, placed = nn.Linear(4, 3), nn.Linear(4, 3)
    placed.load_state_dict(plain.state_dict())
    sw.distribute_module(placed, mesh())
    for batch in layouts_of(2, pending=False)[1:]:
        plain.zero_grad()
        placed.zero_grad()
        wanted = (plain(x) - target).square().mean()
        wanted.backward()
        loss = (placed(place(x, batch)) - place(target, batch)).square().mean()
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
        loss.backward()
        for p, q in zip(placed.parameters(), plain.parameters(), strict=True):
            close(p.grad, q.grad, f"{rows} rows, batch {batch}")


@pytest.mark.parametrize("rows", [8, 5, 1])
@pytest.mark.parametrize("world", only([3], [2, 3, 4]))
def test_the_gradient_of_a_mean_is_not_world_size_times_too_large(ranks, world, rows):
    ranks(world, _mean_loss, rows)


def _cross_entropy(rows):
    x, target = _logits(rows)
    ignored = target.clone()
    ignored[::3] = -100
    weight = torch.tensor([0.1, 2.0, 0.7, 1.5, 0.3])
    choices = itertools.product(("mean", "sum", "none"), (None, weight), (target, ignored), (0.0, 0.1))
    for reduction, w, t, smoothing in choices:
        for layout in layouts_of(2):
            plain = x.clone().requires_grad_()
            wanted = functional.cross_entropy(plain, t, w, reduction=reduction, label_smoothing=smoothing)
            wanted.sum().backward()
            d = place(x, layout, requires_grad=True)
            rows_cut = [p if p == sw.Shard(0) else sw.Replicate() for p in layout]
            loss = functional.cross_entropy(
                d,
                sw.distribute_tensor(t, mesh(), rows_cut),
                None if w is None else sw.distribute_tensor(w, mesh()),
                reduction=reduction,
                label_smoothing=smoothing,
            )
            where = f"{layout} {reduction} weights {w is not None} ignored {t is ignored} {smoothing}"
            close(loss, wanted.detach(), where)
            loss.sum().backward()
            close(d.grad, plain.grad, where)


@pytest.mark.parametrize(("world", "rows"), only([(3, 2)], itertools.product((2, 3), (8, 5, 2))))
def test_cross_entropy_with_weights_and_ignored_rows(ranks, world, rows):
    ranks(world, _cross_entropy, rows)


@pytest.mark.slow
def test_cross_entropy_on_two_axes(ranks):
    ranks(4, _cross_entropy, 5)


def _all_ignored():
    x, target = _logits(4)
    target[:2] = -100  # every row of the first rank
    d = sw.distribute_tensor(x, rank_mesh((2,), ("tp",)), [sw.Shard(0)]).requires_grad_()
    t = sw.distribute_tensor(target, rank_mesh((2,), ("tp",)), [sw.Shard(0)])
    plain = x.clone().requires_grad_()
    wanted = functional.cross_entropy(plain, target)
    wanted.backward()
    loss = functional.cross_entropy(d, t)
    close(loss, wanted.detach())
    loss.backward()
    close(d.grad, plain.grad)
    target[:] = -100
    assert (
        functional.cross_entropy(d, sw.distribute_tensor(target, d.device_mesh, [sw.Shard(0)])).isnan().item()
    )


def test_a_rank_whose_rows_are_all_ignored(ranks):
    ranks(2, _all_ignored)


def _other_losses():
    x, y = full(5, 7), full(5, 7, seed=1)
    cases = [
        (functional.mse_loss, y),
        (functional.l1_loss, y),
        (functional.smooth_l1_loss, y),
        (functional.huber_loss, y),
        (functional.binary_cross_entropy_with_logits, (y > 0).float()),
        (lambda a, b: functional.kl_div(a.log_softmax(-1), b, reduction="batchmean"), y.softmax(-1)),
        (lambda a, b: functional.nll_loss(a.log_softmax(-1), b), torch.tensor([1, 0, 6, 3, 2])),
        (functional.multi_margin_loss, torch.tensor([1, 0, 6, 3, 2])),
        (functional.multilabel_margin_loss, torch.tensor([[2, 5, -1, 3, 3, 0, 1]] * 5)),
    ]
    for index, (function, target) in enumerate(cases):
        for layout in layouts_of(2):
            plain = x.clone().requires_grad_()
            wanted = function(plain, target)
            wanted.backward()
            d = place(x, layout, requires_grad=True)
            loss = function(d, sw.distribute_tensor(target, mesh()))
            close(loss, wanted.detach(), f"loss {index} {layout}")
            loss.backward()
            close(d.grad, plain.grad, f"loss {index} {layout}")


@pytest.mark.parametrize("world", only([3], [2, 3]))
def test_other_losses_are_means_over_the_whole_batch(ranks, world):
    ranks(world, _other_losses)


def _losses_of_one_row():
    one, several = torch.tensor(3), torch.tensor([2, 5, -1, 3, 3, 0, 1])
    for function, x, target in (
        (functional.multi_margin_loss, full(7), one),
        (functional.multi_margin_loss, full(7), one[None]),
        (functional.multilabel_margin_loss, full(7), several),
        (functional.multilabel_margin_loss, full(1)[0], torch.zeros(1, dtype=torch.int64)),
    ):
        for layout in layouts_of(x.dim()):
            check_op(
                lambda a, t, f=function: f(a, t, reduction="none"),
                (x, target),
                (layout, [sw.Replicate()] * mesh().ndim),
            )


def test_the_margin_loss_of_one_row_has_the_shape_that_one_device_gives_it(ranks):
    ranks(2, _losses_of_one_row)


def _losses_of_nothing():
    for function in (functional.mse_loss, functional.smooth_l1_loss, functional.huber_loss):
        for layout in layouts_of(2):
            d = place(full(0, 4), layout, requires_grad=True)
            loss = function(d, place(full(0, 4), layout))
            assert torch.isnan(loss.full_tensor())
            loss.backward()
            close(d.grad, full(0, 4), f"{function} {layout}")


def test_the_gradient_of_a_mean_over_no_rows_is_empty(ranks):
    ranks(3, _losses_of_nothing)


def _no_number():
    x, y = full(5, 7), full(5, 7, seed=1)
    x[1, 2] = y[4, 0] = float("nan")
    for function in (functional.mse_loss, functional.smooth_l1_loss, functional.huber_loss):
        plain = x.clone().requires_grad_()
        function(plain, y, reduction="sum").backward()
        for layout in layouts_of(2, pending=False):
            d = place(x, layout, requires_grad=True)
            function(d, sw.distribute_tensor(y, mesh()), reduction="sum").backward()
            torch.testing.assert_close(d.grad.full_tensor(), plain.grad, equal_nan=True)


def test_what_is_no_number_has_no_gradient_that_is_one(ranks):
    ranks(2, _no_number)


def _of_two_dtypes():
    x, y = full(5, 4), full(5, 4, seed=1).sign()
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for one, other in itertools.permutations(dtypes, 2):
        for function in (functional.huber_loss, functional.soft_margin_loss, functional.smooth_l1_loss):
            for reduction, layout in itertools.product(("mean", "none"), layouts_of(2, pending=False)):
                wanted = function(x.to(one), y.to(other), reduction=reduction)
                found = function(place(x.to(one), layout), place(y.to(other), layout), reduction=reduction)
                assert found.dtype == wanted.dtype, (function, one, other, layout)
                loose = 2e-2 if torch.bfloat16 in (one, other) else 2e-3
                torch.testing.assert_close(found.full_tensor(), wanted, atol=loose, rtol=loose)


def test_a_loss_beside_a_wider_target_has_the_dtype_of_one_device(ranks):
    """That of the input in some; both were promoted."""
    ranks(2, _of_two_dtypes)


def _of_bools():
    x, y = full(5, 4), full(5, 4, seed=1) > 0
    for beta, layout in itertools.product((0.5, 1.0), layouts_of(2)):
        plain, placed = x.clone().requires_grad_(), place(x, layout, requires_grad=True)
        functional.smooth_l1_loss(plain, y, beta=beta).backward()
        functional.smooth_l1_loss(placed, sw.distribute_tensor(y, mesh()), beta=beta).backward()
        close(placed.grad, plain.grad, f"{beta} {layout}")


def test_the_gradient_of_a_smooth_loss_beside_bools(ranks):
    ranks(2, _of_bools)


def _naive_mean():
    """A mean of local means, planted: right on equal parts only."""
    x = full(5, 4)
    d = sw.distribute_tensor(x, rank_mesh((2,), ("tp",)), [sw.Shard(0)])
    local = sw.DTensor.from_local(d.to_local().mean(), d.device_mesh, [sw.Partial("avg")])
    with pytest.raises(AssertionError):
        close(local, x.mean())


def test_a_mean_of_local_means_goes_red(ranks):
    ranks(2, _naive_mean)

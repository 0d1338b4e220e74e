"""Gradients that torch makes of a shape alone lie as their operand does."""

from functools import partial

import pytest
import torch
from torch.nn import functional

import shardwright as sw

from .cases import close, full, place

CALLS = {
    "forward mode": lambda x, y: torch.func.jvp(lambda z: z * 2, (x,), (y.detach(),))[1],
    "sgn": lambda x, y: torch.sgn(x),
    "sgn_": lambda x, y: x.clone().sgn_(),
    "copysign": torch.copysign,
    "copysign_": lambda x, y: x.clone().copysign_(y),
    **{
        f"{name} in place": lambda x, y, name=name: getattr(x.clone(), name)(y) + x
        for name in ("eq_", "ne_", "lt_", "le_", "gt_", "ge_", "less_", "greater_equal_")
    },
    "eq_ of a row": lambda x, y: _row_written(x.clone(), y),
    "eq_ with a number": lambda x, y: x.clone().eq_(1.0),
    "no copies": lambda x, y: x.repeat(0, 1).sum() + x.sum(),
    "none at all": lambda x, y: x.tile(0, 1),
    "passed over": lambda x, y: torch.cat([x[0, :0], y[0]]),
    "nothing at all": lambda x, y: torch.hstack([x[0, :0], y[0, :0]]),
}
IN_GRAPHS = ("copysign", "copysign_", "eq_ in place", "eq_ with a number", "passed over")
CUTS = (sw.Shard(0), sw.Shard(1), sw.Ragged((1, 2), (0,)), sw.Replicate())


def _row_written(x, y):
    x[0].eq_(y[0])
    return x


def _undefined_stays_undefined():
    """A list passes nothing on to a member that nobody used."""
    for made in (lambda x: x.clone(), lambda x: place(x, (sw.Shard(0),))):
        x, y, z = (made(full(4, 3, seed=seed)).requires_grad_() for seed in range(3))
        first = torch.nextafter(x.detach(), y)
        _, used = torch._foreach_minimum([first, z], 0.5)
        used.sum().backward()
        assert y.grad is None
        assert z.grad is not None


def test_a_gradient_that_nobody_made_stays_undefined(ranks):
    ranks(2, _undefined_stays_undefined)


# Their first derivative does not depend on the values, so that a second one is zeros of a shape.
TWICE = {
    "avg_pool1d": (lambda x: functional.avg_pool1d(x, 2), 1),
    "avg_pool2d": (lambda x: functional.avg_pool2d(x, 2), 2),
    "avg_pool3d": (torch.nn.AvgPool3d(2), 3),
    "adaptive average": (torch.nn.AdaptiveAvgPool2d(2), 2),
    "adaptive maximum": (lambda x: functional.adaptive_max_pool2d(x, 2), 2),
    "max_pool1d": (torch.nn.MaxPool1d(2), 1),
    "max_pool2d": (lambda x: torch.max_pool2d(x, 2), 2),
    "max_pool3d": (lambda x: functional.max_pool3d(x, 2), 3),
    "lp_pool2d": (lambda x: functional.lp_pool2d(x, 1.0, 2), 2),
    "reflected": (torch.nn.ReflectionPad2d(1), 2),
    "replicated": (lambda x: functional.pad(x, (1, 1), mode="replicate"), 1),
    "prelu": (lambda x: torch.prelu(x, x.detach().flatten()[:1]), 1),
    "average over areas": (lambda x: functional.interpolate(x, 2, mode="area"), 1),
    "abs": (torch.abs, 1),
    "abs in place": (lambda x: x.clone().abs_(), 1),
    "l1_loss": (lambda x: functional.l1_loss(x, x.detach() * 2), 1),
    "sum of magnitudes": (lambda x: torch.linalg.vector_norm(x, 1), 1),
    "largest magnitude": (lambda x: torch.linalg.vector_norm(x, float("inf"), dim=1), 1),
}


def _lie_twice():
    for name, (call, dims) in TWICE.items():
        for cut in (sw.Shard(0), sw.Shard(1), sw.Replicate()):
            plain = full(2, 3, *(4,) * dims).requires_grad_()
            ours = place(plain.detach(), (cut,), requires_grad=True)
            found = []
            for x in (plain, ours):
                (first,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
                first.sum().backward(retain_graph=True)
                (alone,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
                found.append((x.grad, alone))
                x.grad = None  # torch cannot add to zeros that it made of a size
                first.pow(2).sum().backward()
            for got, wanted in zip((*found[1], ours.grad), (*found[0], plain.grad), strict=True):
                assert isinstance(got, sw.DTensor), (name, cut)
                close(got, wanted + 0, name)


def _lie_as_the_operand(compiled=False):
    for name, function in CALLS.items():
        if compiled and name not in IN_GRAPHS:
            continue
        torch._dynamo.reset()
        call = torch.compile(function, backend="aot_eager") if compiled else function
        for cut in (sw.Shard(0),) if compiled else CUTS:
            plain = [full(3, 4, seed=seed).requires_grad_() for seed in (0, 1)]
            ours = [place(x.detach(), (cut,), requires_grad=True) for x in plain]
            wanted, got = function(*plain), call(*ours)
            close(got.detach(), wanted.detach(), name)
            wanted.sum().backward()
            got.sum().backward()
            for x, w in zip(ours, plain, strict=True):
                assert (x.grad is None) == (w.grad is None), name
                if x.grad is not None:
                    assert isinstance(x.grad, sw.DTensor), (name, cut)
                    close(x.grad, w.grad, name)
                    x.grad.add_(x.detach())
                    close(x.grad, w.grad + w.detach(), name)


@pytest.mark.parametrize("world", [2])
def test_a_gradient_made_of_a_shape_lies_as_its_operand(ranks, world):
    ranks(world, _lie_as_the_operand)


def test_a_gradient_made_of_a_shape_in_a_graph_lies_as_its_operand(ranks):
    ranks(2, partial(_lie_as_the_operand, compiled=True))


def test_a_second_derivative_made_of_a_shape_lies_as_its_operand(ranks):
    ranks(2, _lie_twice)


def _no_gradient_reaches_what_no_grad_viewed():
    for call in (torch.sgn, lambda v: torch.cat([v[:0], v]), lambda v: v.copysign(v.detach())):
        for cut in (sw.Shard(0), sw.Replicate()):
            plain = full(5).requires_grad_()
            ours = place(plain.detach(), (cut,), requires_grad=True)
            found = []
            for x in (plain, ours):
                with torch.no_grad():
                    view = x.narrow(0, 1, 3)
                made = call(view) + call(x[:3])
                assert torch.autograd.grad(made.sum(), view, retain_graph=True, allow_unused=True) == (None,)
                made.sum().backward()
                found.append((made.detach(), x.grad))
            for got, wanted in zip(found[1], found[0], strict=True):
                close(got, wanted)


def test_no_gradient_reaches_a_view_that_was_made_without_gradients(ranks):
    ranks(2, _no_gradient_reaches_what_no_grad_viewed)


def _zeros_without_memory():
    for cut in (sw.Shard(1), sw.Shard(0), sw.Replicate()):
        found = []
        for placed in (False, True):
            x, weight = full(2, 4, 6), full(2, 4, 2, seed=1).requires_grad_()
            seeds = full(2, 3, seed=2), full(2, 2, 3, seed=3)
            if placed:
                x, weight = place(x, (cut,)), place(weight.detach(), (sw.Replicate(),), requires_grad=True)
                seeds = place(seeds[0], (sw.Shard(0),)), place(seeds[1], (sw.Shard(1),))
            made = functional.conv1d(x, weight, stride=2)
            seen = made.select(1, 1)
            seen.sgn_()
            torch.autograd.backward([seen, made], seeds)
            found.append(weight.grad)
        close(found[1], found[0], str(cut))


def test_zeros_that_have_no_memory_are_read_beside_what_is_written(ranks):
    ranks(3, _zeros_without_memory)


def _moved(x):
    return x.redistribute(placements=[sw.Shard(1)]) if isinstance(x, sw.DTensor) else x


def _handed_out(x):
    if not isinstance(x, sw.DTensor):
        return x
    return sw.DTensor.from_local(x.to_local(), x.device_mesh, x.placements, shape=x.shape, stride=x.stride())


BATCHES = {
    "an empty slice": lambda x, y: torch.cat([x[0, 4:], x[1], y[0]]),
    "passed over": lambda x, y: torch.cat([x[0, :0], y[0]]),
    "sgn": lambda x, y: torch.sgn(x) * y,
    "eq_": lambda x, y: x.clone().eq_(y) + x,
    "moved": lambda x, y: _moved(x).sin() * y,
    "handed out": lambda x, y: _handed_out(x).sin() * y,
}


def _of_a_batch():
    """`is_grads_batched`: the gradients of other members come as a batch, zeros of a size alone."""
    for name, function in BATCHES.items():
        for cut in CUTS:
            plain = [full(3, 4, seed=seed).requires_grad_() for seed in (0, 1)]
            ours = [place(x.detach(), (cut,), requires_grad=True) for x in plain]
            wanted, got = function(*plain), function(*ours)
            seeds = full(2, *wanted.shape, seed=2)
            batched = {"is_grads_batched": True, "allow_unused": True}
            grads = torch.autograd.grad(wanted, plain, seeds, **batched)
            found = torch.autograd.grad(got, ours, place(seeds, (sw.Replicate(),)), **batched)
            for g, w in zip(found, grads, strict=True):
                assert isinstance(g, sw.DTensor), (name, cut)
                close(g, w, f"{name} {cut}")


def test_a_gradient_made_of_a_shape_stands_beside_a_batch(ranks):
    ranks(2, _of_a_batch)

"""A gradient is labelled truthfully: pending until it is summed, right at any moment, never averaged."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from tests.tiers import one_in

from . import naive
from .models import (
    check_full_gradients,
    check_pending,
    finish,
    one_device_gradients,
    part_of,
    sum_loss,
    token_batch,
    tricky,
)
from .strategies import STRATEGIES, place

NAMES = sorted(STRATEGIES)


def _counts(world, sequences):
    """Sequences per rank, uneven; the last ranks may get none."""
    return [sequences // world + (rank < sequences % world) for rank in range(world)]


def _setup(name, sequences=None):
    world = dist.get_world_size()
    plain = tricky()
    batch = token_batch(sequences or 2 * world - 1)
    wanted = one_device_gradients(plain, batch)
    local = part_of(batch, _counts(world, batch[0].shape[0]), dist.get_rank())
    return place(name, plain), local, batch[0].numel(), wanted


def _life(name):
    """Backward, read, sum, read, backward again, sum, zero in both ways."""
    model, local, count, wanted = _setup(name)
    axes = STRATEGIES[name].pending

    def backward():
        sum_loss(model, local, count).backward()

    backward()
    check_pending(model, axes)
    check_full_gradients(model, wanted)
    check_full_gradients(model, wanted)
    finish(model)
    check_pending(model, ())
    check_full_gradients(model, wanted)
    backward()
    check_full_gradients(model, wanted, scale=2)
    finish(model)
    check_full_gradients(model, wanted, scale=2)
    model.zero_grad(set_to_none=True)
    backward()
    backward()
    check_pending(model, axes)
    check_full_gradients(model, wanted, scale=2)
    finish(model)
    model.zero_grad(set_to_none=False)
    backward()
    check_full_gradients(model, wanted)


@pytest.mark.parametrize("name", one_in(2, NAMES))
def test_a_gradient_is_right_before_and_after_it_is_summed_and_on_a_second_backward(ranks, name):
    ranks(STRATEGIES[name].world, _life, name)


def _few_sequences(name, sequences):
    model, local, count, wanted = _setup(name, sequences)
    sum_loss(model, local, count).backward()
    check_full_gradients(model, wanted)


@pytest.mark.parametrize("name", ["replicate on two axes", "fsdp 2-D", "hsdp", "fsdp on 3"])
def test_ranks_without_a_sequence_take_part(ranks, name):
    ranks(STRATEGIES[name].world, _few_sequences, name, 1)


def _outside(name):
    """Attributes of parameters and the layouts that a checkpoint or an optimizer sees."""
    model, local, count, _ = _setup(name)
    layouts = {n: sw.layout_of(p) for n, p in model.named_parameters()}
    sum_loss(model, local, count).backward()
    for n, p in model.named_parameters():
        assert sw.layout_of(p) == layouts[n], n
        if p.grad is not None:
            assert sw.layout_of(p.grad).mesh_shape == sw.layout_of(p).mesh_shape, n
            assert p.grad.shape == p.shape
    torch.testing.assert_close(model.embed.weight.full_tensor(), tricky().embed.weight.detach())


@pytest.mark.parametrize("name", NAMES)
def test_parameters_keep_their_layout_and_values_over_a_step(ranks, name):
    ranks(STRATEGIES[name].world, _outside, name)


def _unused(name, used_on):
    """A branch that only some ranks take: no rank waits for another, and the sum is right."""
    model, local, _, _ = _setup(name)
    plain = tricky()
    used = dist.get_rank() in used_on
    hidden = torch.ones(2, 6)
    (model.first(hidden).sum() if used else model.norm(hidden).sum()).backward()
    for rank in range(dist.get_world_size()):
        (plain.first(hidden).sum() if rank in used_on else plain.norm(hidden).sum()).backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    assert gradients["gain"] is None
    assert (gradients["first.weight"] is not None) == used
    assert local is not None
    return gradients["first.weight"].to_local() if used else None, plain.first.weight.grad


def test_a_parameter_used_on_some_ranks_only_hangs_nobody(ranks):
    results = ranks(2, _unused, "replicate", (1,), timeout=20)
    assert results[0][0] is None
    torch.testing.assert_close(results[1][0], results[1][1])


def _reduced_by(reduce):
    """The local terms of a replicated model, reduced by hand."""
    model, local, count, wanted = _setup("replicate")
    sum_loss(model, local, count).backward()
    mesh = STRATEGIES["replicate"].mesh
    gradients = {n: p.grad._local_tensor for n, p in model.named_parameters() if p.grad is not None}
    getattr(naive, reduce)(gradients.values(), mesh)
    try:
        for n, g in gradients.items():
            torch.testing.assert_close(g, wanted[n], rtol=1e-5, atol=1e-6)
    except AssertionError:
        return "red"
    return "green"


@pytest.mark.parametrize(("reduce", "color"), [("sums", "green"), ("averages", "red"), ("sums_twice", "red")])
def test_the_gradients_are_terms_of_a_sum(ranks, reduce, color):
    assert ranks(2, _reduced_by, reduce) == [color, color]


def _averaged_by_torch():
    """What `fully_shard` alone gives: the mean over the ranks, 2 times too small for a sum."""
    from torch.distributed.fsdp import fully_shard

    model = tricky()
    batch = token_batch(3)
    wanted = one_device_gradients(model, batch)
    fully_shard(model, mesh=STRATEGIES["fsdp"].mesh)
    sum_loss(model, part_of(batch, (2, 1), dist.get_rank()), batch[0].numel()).backward()
    with pytest.raises(AssertionError):
        check_full_gradients(model, wanted)
    check_full_gradients(model, wanted, scale=0.5)


def test_torchs_own_averaging_goes_red(ranks):
    ranks(2, _averaged_by_torch)


def _by_autograd_grad(name):
    model, local, count, wanted = _setup(name)
    loss = sum_loss(model, local, count)
    got = torch.autograd.grad(loss, [model.first.weight, model.embed.weight])
    torch.testing.assert_close(got[0].full_tensor(), wanted["first.weight"])
    torch.testing.assert_close(got[1].full_tensor(), wanted["embed.weight"])
    assert model.first.weight.grad is None


def test_autograd_grad_gives_pending_gradients_too(ranks):
    ranks(2, _by_autograd_grad, "replicate")


def _train(name, kind, steps=3):
    """Sum, step, zero: parameters equal one device's."""
    plain = tricky()
    world = dist.get_world_size()
    batch = token_batch(2 * world - 1)
    count = batch[0].numel()
    local = part_of(batch, _counts(world, batch[0].shape[0]), dist.get_rank())
    one = copy.deepcopy(plain)
    model = place(name, plain)
    made = {
        "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
        "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
        "adamw loop": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=False),
    }[kind]
    ours, theirs = made(model.parameters()), made(one.parameters())
    for _ in range(steps):
        sum_loss(model, local, count).backward()
        sum_loss(one, batch, count).backward()
        finish(model)
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    for (n, p), q in zip(model.named_parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(
            p.full_tensor(), q.detach(), rtol=1e-4, atol=1e-5, msg=lambda m, n=n: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("name", "kind"),
    one_in(
        3,
        itertools.product(
            ["replicate", "fsdp 2-D", "replicate, then fsdp"],
            ["sgd", "adamw foreach", "adamw fused", "adamw loop"],
        ),
    ),
)
def test_a_few_steps_are_those_of_one_device(ranks, name, kind):
    ranks(STRATEGIES[name].world, _train, name, kind)


def _gradient_penalty():
    """A loss with the norm of a gradient in it: the second derivative is that of one device."""
    from shardwright.parallel import parallelize_replicate
    from shardwright.testing.meshes import rank_mesh

    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    x = torch.randn(6, 4)

    def loss(model, rows):
        total = model(rows).square().sum() / 6
        gradients = torch.autograd.grad(total, list(model.parameters()), create_graph=True)
        return total, gradients

    one = copy.deepcopy(plain)
    total, gradients = loss(one, x)
    (total + sum(g.square().sum() for g in gradients)).backward()
    model = parallelize_replicate(plain, rank_mesh((2,), ("dp",)))
    total, gradients = loss(model, x.split((4, 2))[dist.get_rank()])
    penalty = sum(g.square().sum() for g in gradients)
    assert penalty.requires_grad
    # a DTensor is one logical value, so its gradient is whole on every rank: no division by the ranks
    (total + penalty.full_tensor()).backward()
    check_full_gradients(model, {n: p.grad for n, p in one.named_parameters()})


def test_a_gradient_penalty_is_differentiated_twice(ranks):
    ranks(2, _gradient_penalty)


def _term_of_parameters(name):
    model, local, count, wanted = _setup(name)
    used = {n: p for n, p in model.named_parameters() if wanted[n] is not None}
    (sum_loss(model, local, count) + sum(p.full_tensor().square().sum() for p in used.values())).backward()
    ties = {p: 2 * p.full_tensor().detach() for p in used.values()}
    decayed = {n: ties[p] for n, p in model.named_parameters(remove_duplicate=False) if p in ties}
    check_full_gradients(model, {n: g if g is None else g + decayed[n] for n, g in wanted.items()})


@pytest.mark.parametrize("name", ["replicate", "fsdp", "fsdp by blocks", "hsdp", "replicate, then fsdp"])
def test_a_term_of_parameters_counts_once_where_it_reads_them_by_full_tensor(ranks, name):
    ranks(STRATEGIES[name].world, _term_of_parameters, name)

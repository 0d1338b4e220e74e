"""Ranks with the same gradients need no collective to find that out; one with others is noticed by all."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright.comm.record import Recorder
from shardwright.errors import ParallelError
from shardwright.grads import GradientSynchronizer, clip_grad_norm_
from shardwright.grads.alike import are_alike, in_numbers
from shardwright.moe import MoELayer
from shardwright.parallel import parallelize_expert_parallel, parallelize_fsdp, parallelize_replicate
from shardwright.placement import Partial, Replicate, Shard
from shardwright.tensor.distribute import distribute_tensor
from shardwright.tensor.dtensor import DTensor
from shardwright.testing import rank_mesh

WIDTH, EXPERTS, ROWS = 8, 4, 6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_bit_that_one_of_many_ranks_has_otherwise_is_seen(dtype):
    digest, other = 0x0123456789ABCDEF, 0x0123456789ABCDEF ^ (1 << 40)

    def sums(digests):
        total = torch.zeros(128, dtype=dtype)
        for each in digests:
            total += in_numbers(each, dtype, total.device)
        return total

    assert are_alike(sums([digest] * 1000))
    assert not are_alike(sums([digest] * 999 + [other]))
    assert not are_alike(sums([other] + [digest] * 999))
    assert are_alike(sums([0] * 3))
    assert not are_alike(sums([0, 2**64 - 1]))


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.moe = MoELayer(WIDTH, WIDTH, EXPERTS, 2)
        self.scale = nn.Linear(WIDTH, WIDTH, bias=False)
        self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.scale(self.moe(self.inner(x)))


def _nets(*, sharded):
    torch.manual_seed(0)
    plain = _Net().double()
    mesh = rank_mesh((2,), ("ep_shard",))
    model = copy.deepcopy(plain)
    if not sharded:
        parallelize_replicate(model, mesh)
    parallelize_expert_parallel(model, mesh)
    if sharded:
        parallelize_fsdp(model.inner, mesh)
        parallelize_fsdp(model.scale, mesh)
    for p, q in zip(plain.spare.parameters(), model.spare.parameters(), strict=True):
        p.requires_grad_(False)
        q.requires_grad_(False)
    return plain, model


def _rows(step):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def _step(model, plain, synchronizer, step, *, drop=()):
    """One backward of both; `drop`: (rank, parameter) whose gradient goes before the block ends."""
    x, rank = _rows(step), dist.get_rank()
    plain.zero_grad()
    model.zero_grad()
    plain(x).square().sum().backward()
    own = x.tensor_split(2)[rank]
    loss = model(own).square().sum()
    with synchronizer.overlapped():
        loss.backward()
        for where, name in drop:
            if rank == where:
                model.get_parameter(name).grad = None


def _compare(model, plain, *, without=()):
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if name in without or q.grad is None:
            continue
        assert tuple(p.grad.placements) == tuple(p.placements), name
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-9, atol=1e-9, msg=name)


def _counted(sharded):
    plain, model = _nets(sharded=sharded)
    synchronizer = GradientSynchronizer(model)
    reasons = []
    for step in range(2):
        with Recorder() as recorder:
            _step(model, plain, synchronizer, step)
            norm = clip_grad_norm_(model, 0.5)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(norm, expected, rtol=1e-9, atol=1e-9, check_dtype=False)
        _compare(model, plain)
        reasons.append([each.reason for each in recorder.collectives if "gradients" in each.reason])
    return reasons


@pytest.mark.parametrize("sharded", [False, True])
def test_a_step_agrees_in_the_sums_that_it_sends_anyway(ranks, sharded):
    unit = ["gradients of a sharded unit"] * (2 if sharded else 0)
    for first, second in ranks(2, _counted, sharded):
        assert first == second
        assert sorted(second) == sorted([*unit, "sum gradients", "norm of gradients"])


def _dropped(name):
    """Rank 1 loses the gradient of what nobody sums: zeros there, and all ranks go on together."""
    plain, model = _nets(sharded=True)
    synchronizer = GradientSynchronizer(model)
    _step(model, plain, synchronizer, 0)
    _step(model, plain, synchronizer, 1, drop=[(1, name)])
    _compare(model, plain, without=[name])
    found = model.get_parameter(name)
    wanted = plain.get_parameter(name).grad.clone()
    wanted[len(wanted) // 2 :] = 0  # what rank 1 holds
    torch.testing.assert_close(found.grad.full_tensor(), wanted, rtol=1e-9, atol=1e-9)
    with Recorder() as recorder:
        _step(model, plain, synchronizer, 2)
    _compare(model, plain)
    return "which ranks have which gradients" in {each.reason for each in recorder.collectives}


@pytest.mark.parametrize("name", ["moe.experts.up.weight", "scale.weight"])
def test_a_gradient_that_one_rank_lacks_is_noticed_in_the_step_where_it_is(ranks, name):
    assert ranks(2, _dropped, name, timeout=60) == [False, False]


def _contradicts():
    _, model = _nets(sharded=True)
    synchronizer = GradientSynchronizer(model)
    weight = model.moe.experts.up.weight
    loss = model(_rows(0)).square().sum()

    def unlike():
        with synchronizer.overlapped():
            loss.backward()
            if dist.get_rank():
                whole = torch.zeros(EXPERTS, WIDTH // 2, WIDTH).double()
                weight.grad = DTensor.from_local(whole, weight.device_mesh, [Shard(1)])

    with pytest.raises(ParallelError, match=r"moe.experts.up.weight.*other layouts on some ranks"):
        unlike()


def test_a_layout_of_ones_own_is_refused_on_every_rank(ranks):
    ranks(2, _contradicts, timeout=60)


def _after_the_sum(what, norm_type):
    """What a rank does to its gradients between the sum and the norm."""
    plain, model = _nets(sharded=False)
    synchronizer = GradientSynchronizer(model)
    _step(model, plain, synchronizer, 0)
    weight, other = model.inner.weight, plain.inner.weight
    if what == "lacks one":
        if dist.get_rank():
            model.moe.experts.up.weight.grad = None
        plain.moe.experts.up.weight.grad[EXPERTS // 2 :] = 0
    elif what == "a term on one":
        if dist.get_rank():
            local = weight.grad.to_local() + 1
            weight.grad = DTensor.from_local(local, weight.device_mesh, [Partial()])
        other.grad += other.grad + 1  # the sum counts once, the term beside it
    elif what == "terms on all":
        weight.grad = DTensor.from_local(torch.ones(WIDTH, WIDTH).double(), weight.device_mesh, [Partial()])
        other.grad = torch.full_like(other.grad, 2.0)
    elif what == "none on all":
        weight.grad, other.grad = None, None
    norm = clip_grad_norm_(model, 0.5, norm_type)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-9, atol=1e-9, check_dtype=False)
    _compare(model, plain)


@pytest.mark.parametrize("what", ["nothing", "lacks one", "a term on one", "terms on all", "none on all"])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_the_norm_is_that_of_one_device_whatever_a_rank_did_before(ranks, what, norm_type):
    ranks(2, _after_the_sum, what, norm_type, timeout=60)


def _two_meshes_of_the_same_ranks():
    """Buckets and norms join over meshes whose axes have other names and sizes of one."""
    first, second = rank_mesh((2,), ("a",)), rank_mesh((1, 2, 1), ("x", "y", "z"))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
    model = copy.deepcopy(plain)
    parallelize_replicate(model[0], first)
    parallelize_replicate(model[1], second)
    cut = nn.Parameter(
        distribute_tensor(torch.ones(4).double(), second, [Replicate(), Shard(0), Replicate()])
    )
    cut.grad = distribute_tensor(torch.arange(4.0).double(), second, cut.placements)
    named = [*model.named_parameters(), ("cut", cut)]
    synchronizer = GradientSynchronizer(named)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain(x).square().sum().backward()
    with Recorder() as recorder:
        loss = model(x.chunk(2)[dist.get_rank()]).square().sum()
        with synchronizer.overlapped():
            loss.backward()
        norm = clip_grad_norm_(named, 1e9)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-9, atol=1e-9)
    total = sum(float(q.grad.square().sum()) for q in plain.parameters()) + 14
    assert abs(float(norm) - total**0.5) < 1e-9
    return [each.reason for each in recorder.collectives]


def test_meshes_of_the_same_ranks_share_their_collectives(ranks):
    assert ranks(2, _two_meshes_of_the_same_ranks) == [["sum gradients", "norm of gradients"]] * 2

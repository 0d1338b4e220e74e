"""Between a forward and its backward a sharded model is what it is before: programs equal one device."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from shardwright.compat.fully_shard.parameters import groups_of
from shardwright.grads import GradientSynchronizer, clip_grad_norm_
from shardwright.parallel import parallelize_fsdp
from shardwright.testing.meshes import rank_mesh
from tests.tiers import one_in


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.outer = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.arange(1.0, 5.0))

    def forward(self, x):
        return self.outer(self.inner(x).tanh()) * self.scale


def _descent(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def _step(model, optimizer, x):
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def _zeroed_between(model, x):
    optimizer = _descent(model, 0.01)
    for _ in range(3):
        loss = model(x).square().sum()
        model.zero_grad()
        loss.backward()
        optimizer.step()


def _none_between(model, x):
    for _ in range(2):
        loss = model(x).square().sum()
        for parameter in model.parameters():
            parameter.grad = None
        loss.backward()
    _descent(model).step()


def _clipped_after_a_metric(model, x):
    model(x).square().sum().backward()
    model(x)
    norm = clip_grad_norm_(model.parameters(), 0.01)
    _descent(model).step()
    return norm


def _clipped_by_torch(model, x):
    model(x).square().sum().backward()
    model(x)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    _descent(model).step()
    return norm


def _synchronized_between(model, x):
    loss = model(x).square().sum()
    sharded = isinstance(model, FSDPModule)
    synchronizer = GradientSynchronizer(model) if sharded else None
    loss.backward()
    if synchronizer is not None:
        synchronizer.synchronize()
    _descent(model).step()


def _optimizer_made_late(model, x):
    loss = model(x).square().sum()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loss.backward()
    optimizer.step()
    return _step(model, optimizer, x)


def _clamped_after_a_metric(model, x):
    optimizer = _descent(model, 0.01)
    for _ in range(2):
        _step(model, optimizer, x)
        model(x)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)
    return model(x).detach()


def _written_through_data(model, x):
    seen = []
    for _ in range(3):
        model(x)
        for parameter in model.parameters():
            parameter.data.mul_(1.5)
        seen.append(model(x).detach().sum())
        for parameter in model.parameters():
            parameter.data.clamp_(-1, 1)
        seen.append(model(x).detach().sum())
    return seen


def _read_between(model, x):
    model(x)
    return [p.detach().sum() for p in model.parameters()]


PROGRAMS = [
    _zeroed_between, _none_between, _clipped_after_a_metric, _clipped_by_torch, _synchronized_between,
    _optimizer_made_late, _clamped_after_a_metric, _written_through_data, _read_between,
]  # fmt: skip


def _sharded(model, mesh, apart, keep):
    if apart:
        parallelize_fsdp(model.inner, mesh, reshard_after_forward=keep is None or keep)
    return parallelize_fsdp(model, mesh, reshard_after_forward=keep)


def _whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _compare(program, apart, keep, world):
    torch.manual_seed(0)
    alone, x = _Net(), torch.randn(4 * world, 4)
    model = _sharded(copy.deepcopy(alone), rank_mesh((world,), ("dp",)), apart, keep)
    rank = torch.distributed.get_rank()
    wanted, got = program(alone, x), program(model, x.chunk(world)[rank])
    if program is _written_through_data:
        got = torch.stack(got)
        torch.distributed.all_reduce(got)
        torch.testing.assert_close(got, torch.stack(wanted), rtol=1e-4, atol=1e-4)
    if program in (_clipped_after_a_metric, _clipped_by_torch, _read_between):
        for one, other in zip(*map(torch.utils._pytree.tree_leaves, (wanted, got)), strict=True):
            torch.testing.assert_close(_whole(other), one, rtol=1e-4, atol=1e-6)
    for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(
            mine.full_tensor(), theirs, rtol=1e-4, atol=1e-6, msg=f"{program.__name__} {name}"
        )


def _compare_all(apart, keep, world):
    for program in PROGRAMS:
        _compare(program, apart, keep, world)


@pytest.mark.parametrize(("apart", "keep"), one_in(2, itertools.product([False, True], [None, True, False])))
def test_a_program_that_touches_parameters_between_is_as_on_one_device(ranks, apart, keep):
    ranks(2, _compare_all, apart, keep, 2)


def test_so_it_is_where_units_keep_a_part_for_the_backward(ranks):
    ranks(4, _compare_all, True, 2, 4)


def _forms():
    """What is shown, and when."""
    model = _sharded(_Net(), rank_mesh((2,), ("dp",)), True, None)
    before = list(model.parameters())
    x = torch.randn(3, 4)

    def same():
        return all(a is b for a, b in zip(before, model.parameters(), strict=True))

    kept = model(x).sum()
    assert same()
    model.unshard()
    assert not hasattr(model.scale, "placements")
    kept.backward()
    assert same()
    model.set_reshard_after_backward(False)
    model(x).sum().backward()
    assert same()
    stale = model(x).sum()
    with torch.no_grad():
        model.scale.add_(1)
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_parameters_are_the_sharded_ones_but_inside(ranks):
    ranks(2, _forms)


class _Policy(nn.Module):
    """Returns a parameter, and a view of one, as policies do."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Linear(4, 3)
        self.spread = nn.Parameter(torch.arange(3.0))

    def forward(self, x):
        return {"mean": self.mean(x), "spread": self.spread, "two": self.spread[:2]}


class _Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy = _Policy()

    def forward(self, x):
        out = self.policy(x)
        loss = (out["mean"] * out["spread"].exp()).sum() + out["two"].sum()
        return loss, out


def _returned(apart):
    torch.manual_seed(0)
    alone = _Outer()
    model, x = copy.deepcopy(alone), torch.randn(4, 4)
    mesh, rank = rank_mesh((2,), ("dp",)), torch.distributed.get_rank()
    if apart:
        parallelize_fsdp(model.policy, mesh)
    parallelize_fsdp(model, mesh)
    with torch.no_grad():
        _, out = model(x)
        assert torch.equal(out["spread"] * 2, torch.arange(3.0) * 2)
        assert torch.equal(out["two"] + 1, torch.tensor([1.0, 2.0]))
    (loss, out), (wanted, _) = model(x.chunk(2)[rank]), alone(x)
    loss.backward()
    wanted.backward()
    assert torch.equal(out["spread"], torch.arange(3.0))  # what was returned outlives the backward
    bias, spread = model.policy.mean.bias.grad, model.policy.spread.grad
    torch.testing.assert_close(bias.full_tensor(), alone.policy.mean.bias.grad)
    extra = torch.tensor([1.0, 1.0, 0.0])  # the second term is of parameters alone: once for each rank
    torch.testing.assert_close(spread.full_tensor(), alone.policy.spread.grad + extra)


@pytest.mark.parametrize("apart", [False, True])
def test_a_parameter_that_a_forward_returns_stays_what_it_is(ranks, apart):
    ranks(2, _returned, apart)


class _Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.linear, self.make = nn.Linear(4, 4), make

    def forward(self, x):
        return self.linear(x), self.make()


_WITHOUT_STORAGE = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "mkldnn": lambda: torch.ones(2, 2).to_mkldnn(),
    "none": lambda: None,
}


def _of_any_kind():
    mesh = rank_mesh((2,), ("dp",))
    for make in _WITHOUT_STORAGE.values():
        out, other = parallelize_fsdp(_Returns(make), mesh)(torch.randn(3, 4))
        out.sum().backward()
        assert type(other) is type(make())
    model, x = parallelize_fsdp(nn.Linear(4, 4), mesh), torch.randn(3, 4)
    with torch.no_grad():
        assert torch.vmap(model)(x).shape == (3, 4)
    value, tangent = torch.func.jvp(model, (x,), (x,))
    torch.testing.assert_close(tangent, value.detach() - model.bias.full_tensor().detach())


def test_what_a_unit_returns_may_have_no_storage(ranks):
    ranks(2, _of_any_kind)


def _frozen():
    mesh, x = rank_mesh((2,), ("dp",)), torch.randn(3, 4)
    teacher = parallelize_fsdp(_Net().requires_grad_(False), mesh)
    wanted = [p.full_tensor() for p in teacher.parameters()]
    for _ in range(2):
        teacher(x)  # not under `no_grad`
        for parameter, before in zip(teacher.parameters(), wanted, strict=True):
            parameter.lerp_(torch.zeros_like(parameter), 0.5)
            before.mul_(0.5)
    alone = _Net()
    alone.load_state_dict(dict(zip(dict(alone.named_parameters()), wanted, strict=True)))
    torch.testing.assert_close(teacher(x), alone(x).detach())
    (held,) = groups_of(teacher._get_fsdp_state())
    assert held.is_sharded  # no backward comes that would free the memory
    for parameter, whole in zip(teacher.state_dict().values(), wanted, strict=True):
        assert torch.equal(parameter.full_tensor(), whole)


def test_an_average_of_a_frozen_model_is_what_it_computes_with(ranks):
    ranks(2, _frozen)


class _WritesViews(nn.Module):
    """Linear layers return views of three dims, which are written here."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 6)

    def forward(self, x, recompute):
        h = checkpoint(self.inner, x, use_reentrant=False) if recompute else self.inner(x)
        h += x
        left, right = self.outer(h.relu_()).transpose(0, 1).split(3, dim=-1)
        return left.mul(right).mul_(2)[..., 0].add_(1)


def _views_are_written(recompute):
    torch.manual_seed(0)
    mesh, alone, x = rank_mesh((2,), ("dp",)), _WritesViews(), torch.randn(4, 3, 4)
    model = copy.deepcopy(alone)
    for unit in (model.inner, model.outer, model):
        parallelize_fsdp(unit, mesh)
    for _ in range(2):
        model(x.chunk(2)[mesh.get_local_rank()], recompute).square().sum().backward()
        alone(x, recompute).square().sum().backward()
        for mine, wanted in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), wanted.grad)


@pytest.mark.parametrize("recompute", [False, True])
def test_what_a_unit_returns_may_be_a_view_that_is_written(ranks, recompute):
    """torch warns of it, and fails in the backward with memory that was given back."""
    ranks(2, _views_are_written, recompute)


class _Leaves(nn.Module):
    """A unit whose loss of its own is made last, and left; `all_of_it`: it returns nothing."""

    def __init__(self, all_of_it):
        super().__init__()
        self.inner, self.router, self.all_of_it, self.left = nn.Linear(4, 4), nn.Linear(4, 3), all_of_it, []

    def forward(self, x):
        y = self.inner(x).tanh()
        self.left = [self.router(x.tanh()).softmax(-1).square().sum(), y]
        return None if self.all_of_it else y


class _Around(nn.Module):
    def __init__(self, all_of_it):
        super().__init__()
        self.first, self.second = _Leaves(all_of_it), _Leaves(all_of_it)

    def forward(self, x):
        for unit in (self.first, self.second):
            out = unit(x)
            x = unit.left[1] if out is None else out
        return x


def _left_in_attributes(all_of_it, apart):
    torch.manual_seed(0)
    alone, x, mesh = _Around(all_of_it), torch.randn(4, 4), rank_mesh((2,), ("dp",))
    model = copy.deepcopy(alone)
    for unit in (model.first, model.second) if apart else ():
        parallelize_fsdp(unit, mesh)
    parallelize_fsdp(model, mesh)
    for each, rows in ((alone, x), (model, x.chunk(2)[torch.distributed.get_rank()])):
        for _ in range(2):
            out = each(rows)
            (each.first.left[0] + each.second.left[0] + out.square().sum()).backward()
    for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, msg=name)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("all_of_it", [False, True])
def test_what_a_unit_leaves_in_attributes_has_its_gradient(ranks, all_of_it, apart):
    """Its backward is reached before that of what the unit returns, or alone."""
    ranks(2, _left_in_attributes, all_of_it, apart)

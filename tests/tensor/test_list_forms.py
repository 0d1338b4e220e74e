"""Lists of tensors do what each of their positions does alone: values, placements, versions, records."""

import pytest
import torch

import shardwright as sw
from shardwright.errors import ImplicitRedistributionError
from shardwright.testing.meshes import rank_mesh

from .cases import close

R, S0, S1, SUM, MIN = sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Partial(), sw.Partial("min")
_X = torch.arange(12.0).view(3, 4) - 5.5


def _put(x, placement):
    mesh = rank_mesh((2,), ("tp",))
    if not placement.is_pending:
        return sw.distribute_tensor(x, mesh, [placement])
    return sw.distribute_tensor(x, mesh, [R]).redistribute(mesh, [placement])


def _negated():
    """The least part, negated, is the largest: the placement stays, so the value has to be finished."""
    expected = -_X.amin(1)
    for negate in (
        torch.Tensor.neg_,
        torch.negative_,
        lambda v: torch._foreach_neg_([v]),
        lambda v: torch.mul(v, -1.0, out=v),
        lambda v: v[:].neg_(),
        lambda v: torch.neg(v, out=v),
    ):
        v = sw.distribute_tensor(_X, rank_mesh((2,), ("tp",)), [S1]).amin(1)
        negate(v)
        assert v.placements == (MIN,)
        close(v, expected)
    v = sw.distribute_tensor(_X, rank_mesh((2,), ("tp",)), [S1]).amin(1)
    close(torch._foreach_neg([v])[0], expected)
    close(torch._foreach_neg([v, v])[1], expected)
    base = _put(_X, MIN)
    base[1:].neg_()
    close(base, torch.cat([_X[:1], -_X[1:]]))
    largest, total = (f(_put(_X, S1), 1) for f in (torch.amax, torch.sum))
    largest.mul_(total)
    assert largest.placements == (sw.Partial("max"),)
    close(largest, _X.amax(1) * _X.sum(1))


def test_a_form_that_writes_keeps_the_placement_and_gives_the_value(ranks):
    ranks(2, _negated)


def _positions():
    """Ops whose lists agree in placement, but not in what the op does to them."""
    scalar = _put(torch.ones(4), S0).sum()
    close(torch._foreach_mul([_put(_X, S0)], scalar)[0], _X * 4)
    close(torch._foreach_mm([_put(_X, S0)], [_put(_X.T.contiguous(), S0)])[0], _X @ _X.T)
    one = [_put(torch.tensor(x), sw.Owner(0)) for x in (1.5, 2.0)]  # the other rank has no number, but (0,)
    torch._foreach_mul_(one[:1], one[1])
    close(one[0], torch.tensor(3.0))
    close(one[0].fill_(one[1]), torch.tensor(2.0))
    close(one[0].masked_fill_(one[1] > 0, one[1] + 1), torch.tensor(3.0))
    for placement in (S0, S1, SUM):
        x = [_put(_X, placement)]
        close(torch._foreach_powsum(x, 3)[0], _X.abs().pow(3).sum())
        close(torch._foreach_norm(x, 1)[0], _X.norm(1))
        close(torch._foreach_max(x)[0], _X.max())
        close(torch._foreach_pow(2.0, x)[0], 2.0**_X)
        close(torch._foreach_maximum(x, 1.5)[0], _X.clamp_min(1.5))
        scalars = torch._foreach_addcmul(x, x, x, torch.tensor([0.5]))
        close(scalars[0], torch.addcmul(_X, _X, _X, value=0.5))
        torch._foreach_minimum_(x, 1.5)
        close(x[0], _X.clamp_max(1.5))


def test_each_position_follows_the_rules_of_its_own_op(ranks):
    ranks(2, _positions)


_WRITERS = {
    "add": lambda x: torch._foreach_add_(x, 1.0),
    "add lists": lambda x: torch._foreach_add_(x, x, alpha=2),
    "mul tensor": lambda x: torch._foreach_mul_(x, torch.tensor(2.0)),
    "div numbers": lambda x: torch._foreach_div_(x, [2.0] * len(x)),
    "lerp": lambda x: torch._foreach_lerp_(x, x, 0.5),
    "addcmul": lambda x: torch._foreach_addcmul_(x, x, x, 0.5),
    "addcdiv": lambda x: torch._foreach_addcdiv_(x, x, x, [0.5] * len(x)),
    "neg": torch._foreach_neg_,
    "exp": torch._foreach_exp_,
    "zero": torch._foreach_zero_,
    "copy": lambda x: torch._foreach_copy_(x, x),
    "clamp": lambda x: torch._foreach_clamp_max_(x, 1.0),
    "functional": lambda x: torch._foreach_add(x, 1.0),
    "out": lambda x: torch.ops.aten._foreach_neg.out(x, out=x),
    "unscale": lambda x: torch._amp_foreach_non_finite_check_and_unscale_(
        x, torch.zeros(1), torch.tensor(0.5)
    ),
    "sgd": lambda x: torch._fused_sgd_(
        x, [v.clone() for v in x], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0,
        nesterov=False, maximize=False, is_first_step=True,
    ),
}  # fmt: skip


def _versions():
    for name, write in _WRITERS.items():
        plain, ours = [_X.clone(), _X.clone()], [_put(_X, S0), _put(_X, SUM)]
        for lists in (plain, ours, [ours[0]]):
            write(lists)
        raised = [x._version for x in ours]
        assert raised == [2 * plain[0]._version, plain[1]._version], (name, raised)
        close(ours[1], plain[1])


def test_a_list_form_raises_versions_as_on_one_device(ranks):
    ranks(2, _versions)


def _stale():
    for placement in (S0, R):
        x = _put(_X, placement).requires_grad_()
        y = x.exp()
        torch._foreach_mul_([y.detach()], 2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_backward_notices_what_a_list_form_wrote(ranks):
    ranks(2, _stale)


_WRITTEN = {
    "neg": torch._foreach_neg_,
    "add": lambda xs: torch._foreach_add_(xs, 1.0),
    "mul": lambda xs: torch._foreach_mul_(xs, xs),
    "copy": lambda xs: torch._foreach_copy_(xs, [x * 2 for x in xs]),
    "zero": torch._foreach_zero_,  # one device takes it
}


def _refused_at_its_turn():
    """Of one row, so that a rank has no elements; what comes before is written, what comes after is not."""
    for name, write in _WRITTEN.items():
        seen = []
        for put in (torch.clone, lambda x: _put(x, S0)):
            xs = [put(torch.ones(1, 4)), put(torch.ones(1, 1)).expand(1, 4), put(torch.ones(3))]
            refused = False
            try:
                write(xs)
            except RuntimeError as error:
                refused = "single memory location" in str(error)
            seen.append((xs, refused))
        assert seen[0][1] == seen[1][1] == (name != "zero"), name
        for one, two in zip(seen[1][0], seen[0][0], strict=True):
            close(one, two, name)
    for cut in (S0, S1):  # of one column, too, a rank has nothing
        base, plain = _put(torch.arange(8.0).view(8, 1), cut), torch.arange(8.0).view(8, 1)
        for x in (plain, base):
            with pytest.raises(RuntimeError, match="single memory location"):
                torch._foreach_add_([x[:1], x[1:5]], [x[:1], x[:4]])
        close(base, plain)


def test_what_one_device_refuses_to_write_all_ranks_refuse_at_its_turn(ranks):
    ranks(2, _refused_at_its_turn)


_SGD = {
    "weight_decay": 0.1, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False,
    "maximize": False, "is_first_step": False,
}  # fmt: skip


def _step(placements, scale=None):
    tensors = [_put(x.clone(), p) for x, p in zip((_X, _X.sin(), _X.cos()), placements, strict=True)]
    expected = [_X.clone(), _X.sin(), _X.cos()]
    for lists in (expected, tensors):
        given = None if scale is None else torch.tensor(scale)
        with sw.trace() as record:
            torch._fused_sgd_(*([x] for x in lists), **_SGD, grad_scale=given)
    for x, value, placement in zip(tensors, expected, placements, strict=True):
        assert x.placements == (placement,)
        close(x, value)
    return record


def _fused():
    for placements in ((S0, S1, S0), (S0, SUM, S0), (R, SUM, R), (SUM, S0, SUM), (S1, R, S0)):
        record = _step(placements)
        assert any(row.reason.startswith("redistribute") for row in record.table().rows)
        _step(placements, scale=2.0)  # which writes the gradients, too
    assert len(_step((S0, S1, S0)).collectives) == 1  # the gradient is read, so nothing goes back
    assert len(_step((S0, S1, S0), scale=2.0).collectives) == 2
    with sw.explicit():
        first = [_put(_X, S0), _put(_X, R)]
        with pytest.raises(ImplicitRedistributionError, match=r"grads\[0\].redistribute"):
            torch._fused_sgd_(first, [_put(_X, S0), _put(_X, SUM)], [], **_SGD | {"momentum": 0.0})
        close(first[0], _X)  # refused before the first position is written
        with pytest.raises(ImplicitRedistributionError):
            torch._foreach_add_(first, [_put(_X, S0), _put(_X, SUM)])
        close(first[0], _X)
        with pytest.raises(ImplicitRedistributionError):
            _put(_X, MIN).neg_()


def test_a_fused_step_moves_nothing_unasked_and_unrecorded(ranks):
    ranks(2, _fused)


def _steps_of_an_optimizer():
    """Corrections of AdamW and rates of a schedule are other numbers at every step, for the same layouts."""
    from shardwright.tensor.dispatch.ways import lists

    mesh = rank_mesh((2,), ("tp",))
    parameters = [torch.nn.Parameter(sw.distribute_tensor(_X.clone(), mesh, [p])) for p in (S0, S1, R, S0)]
    alone = [torch.nn.Parameter(_X.clone()) for _ in parameters]
    known = []
    for fused in (False, True):
        pairs = [
            (x, torch.optim.AdamW(x, lr=0.1, foreach=not fused, fused=fused)) for x in (parameters, alone)
        ]
        for step in range(4):
            for values, optimizer in pairs:
                for value in values:
                    value.grad = value.detach() * 0.5 + step
                optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
                optimizer.step()
            known.append(len(lists._known))
        for mine, one in zip(parameters, alone, strict=True):
            close(mine, one)
    return known


def test_steps_with_other_numbers_are_decided_once(ranks):
    for known in ranks(2, _steps_of_an_optimizer):
        assert known[1:4] == known[1:2] * 3
        assert known[5:8] == known[5:6] * 3


def _numbers_that_decide():
    """Norms of parts combine by the norm itself; a factor of what is pending may be taken in or not."""
    for order in (2.0, 1.0, torch.inf, 3.0):
        x = sw.distribute_tensor(_X, rank_mesh((2,), ("tp",)), [S0])
        for made in torch._foreach_norm([x, x], order):
            close(made, torch.linalg.vector_norm(_X, order))
    for factor in (2.0, -2.0):
        largest = sw.distribute_tensor(_X, rank_mesh((2,), ("tp",)), [S0]).amax(0)
        assert largest.placements[0].is_pending
        for numbers in (factor, [factor] * 2):
            close(torch._foreach_mul([largest, largest], numbers)[1], _X.amax(0) * factor)
        torch._foreach_mul_([largest, largest.clone()], [factor, 1.0])
        close(largest, _X.amax(0) * factor)


def test_numbers_that_decide_are_part_of_the_decision(ranks):
    ranks(2, _numbers_that_decide)


def _beside_a_dtensor_of_torch():
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = rank_mesh((2,), ("tp",))
    mine, foreign = (
        sw.distribute_tensor(_X.clone(), mesh, [S0]),
        distribute_tensor(_X.clone(), mesh, [Shard(0)]),
    )
    for made in (torch._foreach_add([mine, mine], [foreign, mine]), torch._foreach_add([mine, foreign], 1.0)):
        assert all(isinstance(x, sw.DTensor) for x in made)
    close(torch._foreach_add([mine, foreign], [foreign, mine])[1], _X * 2)
    torch._foreach_mul_([mine], [foreign])
    close(mine, _X * _X)


def test_lists_take_dtensors_of_torch(ranks):
    ranks(2, _beside_a_dtensor_of_torch)


# The others read whole matrices, or more than each element's own.
_ELEMENTWISE = "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD"
_WAYS = {"foreach": {"foreach": True}, "one by one": {"foreach": False}, "fused": {"fused": True}}


def _steps_send_nothing(name):
    make = getattr(torch.optim, name)
    takes = make.__init__.__code__.co_varnames
    for way, options in _WAYS.items():
        if next(iter(options)) not in takes:
            continue
        plain = [torch.nn.Parameter(_X.clone()), torch.nn.Parameter(_X[0].clone())]
        ours = [torch.nn.Parameter(_put(p.detach(), S0)) for p in plain]
        pairs = [make(parameters, lr=0.1, **options) for parameters in (plain, ours)]
        for step in range(3):
            for p, q in zip(plain, ours, strict=True):
                p.grad = (step + 1) * torch.sin(p.detach())
                q.grad = _put(p.grad, S0)
            pairs[0].step()
            with sw.trace() as sent:
                pairs[1].step()
            assert (sent.collectives, sent.decisions) == ([], []), (way, sent)
        for p, q in zip(plain, ours, strict=True):
            close(q, p)


@pytest.mark.parametrize("name", _ELEMENTWISE.split())
def test_steps_of_cut_parameters_send_nothing(ranks, name):
    ranks(2, _steps_send_nothing, name)

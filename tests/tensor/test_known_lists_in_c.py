"""Known calls on lists in C: optimizers as on one device, and what makes a list unknown is seen."""

from __future__ import annotations

import pytest
import torch

import shardwright as sw
from shardwright.errors import RuleError
from shardwright.remember import forget
from shardwright.tensor import doors
from tests.tiers import one_in

from .test_known_call_in_c import InPython, _mesh, _operands, _python_runs, _Silent

pytestmark = pytest.mark.skipif(not doors.uses_extension(), reason=f"known calls: {doors.why_python()}")

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True, amsgrad=True, maximize=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "fused adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, foreach=True),
}
STEPS = 5
MANY = 90  # more than a call keeps in place: 64 operands, 160 parts of a key


def _weights(place):
    draw = torch.Generator().manual_seed(0)
    sizes = [(5, 3), (4,), (2, 6)]
    made = [torch.randn(sizes[i % len(sizes)], generator=draw, dtype=torch.float64) for i in range(MANY)]
    return [torch.nn.Parameter(place(x)) for x in made]


def _trained(make, place):
    """The parameters after some steps with clipping and another learning rate at each."""
    weights = _weights(place)
    optimizer = make(weights)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    norms = []
    for step in range(STEPS):
        for i, weight in enumerate(weights):
            weight.grad = (weight.detach() * (i % 3 - 1) + step).clone()
        norms.append(torch.nn.utils.clip_grad_norm_(weights, 5.0 + step))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return [*weights, *norms]


def _as_one_device(name):
    mesh = _mesh()
    plain = _trained(OPTIMIZERS[name], lambda x: x.clone())
    cut = _trained(OPTIMIZERS[name], lambda x: sw.distribute_tensor(x, mesh, [sw.Shard(0)]))
    for one, other in zip(plain, cut, strict=True):
        torch.testing.assert_close(
            other.full_tensor(), one, rtol=1e-9, atol=1e-9
        )  # RMSprop magnifies rounding


@pytest.mark.parametrize("name", one_in(2, OPTIMIZERS))
def test_an_optimizer_steps_as_on_one_device(ranks, name):
    ranks(2, _as_one_device, name)


def _steps_in_c(name):
    mesh = _mesh()
    weights = _weights(lambda x: sw.distribute_tensor(x, mesh, [sw.Shard(0)]))
    optimizer = OPTIMIZERS[name](weights)
    for step in range(STEPS):
        for weight in weights:
            weight.grad = weight.detach() * 2
        if step == STEPS - 1:
            optimizer.param_groups[0]["lr"] = 0.01
            with InPython() as python:
                optimizer.step()
            return python.calls + python.functions
        optimizer.step()
    return None


@pytest.mark.parametrize("name", ["adamw", "fused", "sgd", "fused sgd"])
def test_a_known_step_stays_in_c_whatever_the_learning_rate(ranks, name):
    assert ranks(2, _steps_in_c, name) == [[], []]


def _lists():
    mesh = _mesh()
    return [x.clone() for x in _operands(mesh)[:2]]


def _unknown():
    """What reaches Python where something is otherwise, one list for each change."""
    from shardwright.rules import registry

    made = _lists()
    entries = []

    def rule():
        entries.append(sw.rule("nameless::lists", "...[dim:_], ...[dim:_] -> ...[dim:_]", later=True))

    def add():
        return torch._foreach_add(made, made)

    try:
        found = [_python_runs(add, before=rule)]
    finally:
        registry.registry.remove(entries[0])
    found += [_python_runs(add, before=forget), _python_runs(add, within=_Silent)]
    base = sw.distribute_tensor(torch.arange(16.0), _mesh(), [sw.Interleaved(0, 2)])
    found.append(_python_runs(add, before=lambda: base[::3]))  # a view that had to copy
    return [[call for call in calls if "_foreach" in call] for calls in found]


def test_a_rule_a_mode_a_copied_view_and_forgetting_are_seen(ranks):
    assert ranks(2, _unknown) == [[["aten._foreach_add.List"]] * 4] * 2


def _numbers():
    """A recipe holds for all numbers, not for those of another class, nor beside pending values."""
    made = _lists()
    plain = [x.full_tensor() for x in made]
    for number in (2.0, 3.0, -1.5, 4, True, 0.5):
        for _ in range(2):
            many = torch._foreach_mul(made, number)
            for one, x in zip(torch._foreach_mul(plain, number), many, strict=True):
                assert x.dtype == one.dtype
                assert torch.equal(x.full_tensor(), one)
    whole = [torch.tensor([[1, 2], [3, 4]])] * 2
    counts = [sw.distribute_tensor(x, _mesh(), [sw.Shard(0)]) for x in whole]
    for number in (2, 2.0, 3, True, 2.5):
        for _ in range(2):
            for one, x in zip(
                torch._foreach_add(whole, number), torch._foreach_add(counts, number), strict=True
            ):
                assert x.dtype == one.dtype
                assert torch.equal(x.full_tensor(), one)
    size = _mesh().size()
    terms = [sw.DTensor.from_local(torch.ones(3), _mesh(), [sw.Partial("max")]) for _ in range(2)]
    for number in (2.0, -2.0, 3.0, -1.0):
        for _ in range(2):
            assert [x.full_tensor().tolist() for x in torch._foreach_mul(terms, number)] == [[number] * 3] * 2
    sums = [sw.DTensor.from_local(torch.ones(3), _mesh(), [sw.Partial()]) for _ in range(2)]
    for number in (1.0, 2.0, 0.0):
        for _ in range(2):
            assert [x.full_tensor().tolist() for x in torch._foreach_add(sums, number)] == [
                [size + number] * 3
            ] * 2


def test_numbers_of_a_list_are_those_of_each_call(ranks):
    ranks(2, _numbers)


def _versions():
    """A backward that saved what a list wrote since says so, as on one device."""
    mesh = _mesh()
    for _ in range(4):
        x = sw.distribute_tensor(torch.ones(4, 2), mesh, [sw.Shard(0)])
        w = sw.distribute_tensor(torch.ones(4, 2), mesh, [sw.Shard(0)]).requires_grad_()
        before = x._version
        loss = (x * w).sum()
        with torch.no_grad():
            torch._foreach_mul_([x], 2.0)
        assert x._version > before
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_list_that_was_written_is_another_value(ranks):
    ranks(2, _versions)


def _views():
    """A view beside another list is written position by position, and a base sees the write."""
    base = sw.distribute_tensor(torch.arange(12.0).view(6, 2), _mesh(), [sw.Replicate()])
    plain = torch.arange(12.0).view(6, 2)
    for _ in range(4):
        for values in (base, plain):
            torch._foreach_add_([values[:3], values[3:]], [values[3:], values[:3]])
        assert torch.equal(base.full_tensor(), plain)
        whole = base.clone()
        known = [whole.clone(), whole.clone()]
        torch._foreach_add_(known, [whole, whole])
        assert torch.equal(known[0].full_tensor(), 2 * plain)


def test_views_in_lists_are_for_python(ranks):
    ranks(2, _views)


def _overlapping_views():
    """One device refuses what a rank without elements would do, for a list that is known too."""
    base = sw.distribute_tensor(torch.zeros(4, 1, 6), _mesh(), [sw.Shard(1)])
    one, two = base[:2].clone(), base[:2].clone()
    for _ in range(3):
        torch._foreach_add_([one], [two])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="single memory location"):
            torch._foreach_add_([base[:2]], [base[1:3]])


def test_views_that_overlap_are_refused_on_every_rank(ranks):
    ranks(2, _overlapping_views)


def _finished_forms():
    """A form that was kept of a pending value holds no longer when a list wrote it by another name."""
    mesh = _mesh()
    n = mesh.size()
    for _ in range(3):
        x = 1 * sw.DTensor.from_local(torch.ones(3), mesh, [sw.Partial()])
        raw = x.data
        with sw.spmd(mesh):
            for factor in (2.0, 3.0):
                torch.relu(x)
                torch._foreach_mul_([raw], factor)
            assert torch.equal(torch.relu(x).full_tensor(), torch.full((3,), 6.0 * n))


def test_a_kept_form_counts_the_writes_of_lists(ranks):
    ranks(2, _finished_forms)


def _inference():
    made = _lists()
    for _ in range(3):
        torch._foreach_add_(made, 1.0)
    with torch.inference_mode(), InPython() as python:
        inside = [x.clone() for x in made]
        torch._foreach_add_(inside, 1.0)
        torch._foreach_add_(made, 1.0)
        assert torch.equal(inside[0].full_tensor(), made[0].full_tensor())
    return [call for call in python.calls if "_foreach" in call]


def test_in_inference_mode_python_tells_who_has_a_version(ranks):
    assert ranks(2, _inference) == [["aten._foreach_add_.Scalar"] * 2] * 2


def _gaps():
    """Parameters that lie otherwise are laid out for a fused kernel by Python."""
    mesh = _mesh()
    plain, cut = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), []
    for placed in (lambda x: x.clone(), lambda x: sw.distribute_tensor(x, mesh, [sw.Shard(0)])):
        weights = [torch.nn.Parameter(placed(plain)), torch.nn.Parameter(placed(plain).t().detach())]
        optimizer = torch.optim.AdamW(weights, lr=0.1, fused=True)
        for _ in range(4):
            for weight in weights:
                weight.grad = weight.detach().clone()
            optimizer.step()
        cut.append([x.full_tensor() if isinstance(x, sw.DTensor) else x for x in weights])
    for one, other in zip(*cut, strict=True):
        torch.testing.assert_close(one, other)


def _parts_of_wider_rows():
    """A parameter whose part is a column of a wider matrix: the kernel would walk over its neighbours."""
    mesh = _mesh()
    whole = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    first = 3 * torch.distributed.get_rank()
    wide = whole.clone()
    part = sw.DTensor.from_local(wide[:, first : first + 3], mesh, [sw.Shard(1)], shape=(4, 6), stride=(6, 1))
    weights = [torch.nn.Parameter(whole.clone()), torch.nn.Parameter(part)]
    optimizers = [torch.optim.AdamW([weight], lr=0.1, fused=True) for weight in weights]
    for _ in range(4):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = torch.zeros_like(weight).add_(weight.detach())
            optimizer.step()
    torch.testing.assert_close(weights[1].full_tensor(), weights[0])
    assert torch.equal(wide[:, 3 - first : 6 - first], whole[:, 3 - first : 6 - first])


def test_fused_steps_leave_what_lies_between_alone(ranks):
    ranks(2, _parts_of_wider_rows)


def test_fused_steps_of_what_has_gaps_are_those_of_one_device(ranks):
    ranks(2, _gaps)


def _refused():
    made = _lists()
    for _ in range(3):
        torch._foreach_add_(made, made)
        for wrong in (
            lambda: torch._foreach_add_(made, made[:1]),
            lambda: torch._foreach_add_(made, [torch.ones(8, 6), torch.ones(8, 6)]),
            lambda: torch._foreach_addcmul_(made, made, [made[0], torch.ones(8, 6)]),
        ):
            with pytest.raises((RuleError, RuntimeError)):
                wrong()
        assert torch.equal(made[0].full_tensor(), made[0].full_tensor())
        with sw.explicit(), sw.trace() as record:
            torch._foreach_add_(made, made)
        assert not record.collectives


def test_plain_members_are_refused_beside_known_lists(ranks):
    ranks(2, _refused)


def _localized():
    from shardwright.parallel import parallelize_replicate

    model = torch.nn.Linear(4, 4)
    parallelize_replicate(model, _mesh())
    plain = torch.nn.Linear(4, 4)
    plain.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
    for make in (OPTIMIZERS["adamw"], OPTIMIZERS["fused"], OPTIMIZERS["sgd"]):
        of_model, of_plain = make(model.parameters()), make(plain.parameters())
        for step in range(4):
            for module in (model, plain):
                for p in module.parameters():
                    p.grad = p.detach() * (step + 1)
            with InPython() as python:
                of_model.step()
            of_plain.step()
        assert python.calls + python.functions == []
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q)


def test_parameters_that_compute_locally_step_in_c(ranks):
    ranks(2, _localized)


def _twice_then_two():
    """A list that is written and read, then two lists of its layouts: what is only read stays."""
    mesh = _mesh()
    torch.manual_seed(0)

    def made():
        return [sw.distribute_tensor(torch.randn(4, 3), mesh, [sw.Shard(0)]) for _ in range(3)]

    a, b, v = made(), made(), made()
    for _ in range(3):
        torch._foreach_mul_(a, a)
    weights = [w.requires_grad_() for w in made()]
    saved = sum((w * x).sum() for w, x in zip(weights, v, strict=True))
    torch._foreach_mul_(b, v)
    saved.backward()  # `v` was saved, and nobody wrote it
    for w, x in zip(weights, v, strict=True):
        torch.testing.assert_close(w.grad.full_tensor(), x.full_tensor())


def test_a_list_given_twice_teaches_nothing_of_two_lists(ranks):
    ranks(2, _twice_then_two, timeout=60)


def _itself_first():
    """Law: whether a call reads what it writes decides nothing about later calls of two lists."""
    forget()
    mesh = _mesh()
    plain = [[torch.arange(6.0) + 10 * i + j for i in range(3)] for j in range(2)]
    cut = [[sw.distribute_tensor(x, mesh, [sw.Shard(0)]) for x in xs] for xs in plain]
    ran = []
    for first, second, alpha in ((0, 0, 0.5), (0, 1, 2.0), (1, 1, 0.5), (1, 0, 2.0), (0, 1, 2.0)):
        with torch.no_grad():
            torch._foreach_add_(plain[first], plain[second], alpha=alpha)
            before = [x._version for x in cut[second]]
            with InPython() as python:
                torch._foreach_add_(cut[first], cut[second], alpha=alpha)
        ran.append(len(python.calls + python.functions))
        if first != second:
            assert [x._version for x in cut[second]] == before
        for xs, ys in zip(plain, cut, strict=True):
            for x, y in zip(xs, ys, strict=True):
                assert torch.equal(y.full_tensor(), x)
    return ran[2:]


def test_a_list_that_is_added_to_itself_is_learned_as_any_other(ranks):
    assert ranks(2, _itself_first) == [[0, 0, 0]] * 2

"""Functions that run on local tensors as a whole: one device's values, and what stands between is seen."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
from shardwright.remember import forget
from shardwright.tensor import doors
from shardwright.tensor.dispatch import whole_functions

F = torch.nn.functional
assert sw.DTensor  # the package opens its doors when it is first used
pytestmark = pytest.mark.skipif(not doors.uses_extension(), reason=f"known calls: {doors.why_python()}")


def _mesh():
    world = torch.distributed.get_world_size()
    return sw.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))


def _full():
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=draw) for size in ((8, 6), (8, 6), (6, 6), (6,))]


def _operands():
    mesh = _mesh()
    cut, whole = [sw.Shard(0)], [sw.Replicate()]
    return [sw.distribute_tensor(x, mesh, p) for x, p in zip(_full(), (cut, cut, whole, whole), strict=True)]


class Below:
    """The ops that reach DTensors below torch's dispatcher, inside the block."""

    def __enter__(self):
        self.ops = []
        given = doors.DTensor.__torch_dispatch__

        def seen(cls, func, types, args=(), kwargs=None):
            self.ops.append(str(func))
            return given(func, types, args, kwargs or {})

        doors.DTensor.__torch_dispatch__ = classmethod(seen)
        return self

    def __exit__(self, *error):
        doors.open_doors()


def _lists(x, y):
    made = [x.clone(), y.clone()]
    given = torch._foreach_mul_(made, 3.0)
    assert given is made
    torch._foreach_addcmul_(made, [x, y], [y, x], value=0.5)
    return torch._foreach_add(made, [y, x], alpha=2)[1]


WHOLE = {
    "add": lambda x, y, w, v: x + y,
    "number": lambda x, y, w, v: x * 2.5,
    "reflected": lambda x, y, w, v: 1.0 - x,
    "keyword": lambda x, y, w, v: torch.add(x, y, alpha=2),
    "mm": lambda x, y, w, v: x @ w,
    "pending": lambda x, y, w, v: torch.sum(x, 0),
    "mean": lambda x, y, w, v: x.mean(-1),
    "softmax": lambda x, y, w, v: torch.softmax(x, 1),
    "cat": lambda x, y, w, v: torch.cat([x, y], 1),
    "linear": lambda x, y, w, v: F.linear(x, w, v),
    "layer_norm": lambda x, y, w, v: F.layer_norm(x, (6,), v, v),
    "rms_norm": lambda x, y, w, v: F.rms_norm(x, (6,), v),
    "gelu": lambda x, y, w, v: F.gelu(x),
    "where": lambda x, y, w, v: torch.where(x > 0, x, y),
    "dtype": lambda x, y, w, v: x.to(torch.float64),
    "written": lambda x, y, w, v: x.clone().add_(y),
    "copied": lambda x, y, w, v: x.clone().copy_(y),
    "lists": lambda x, y, w, v: _lists(x, y),
}


def _run_whole(names):
    forget()  # a function that was never whole in this process is not looked at any more
    operands, full = _operands(), _full()
    found = {}
    for name in names:
        for _ in range(3):
            WHOLE[name](*operands)
        with Below() as below:
            out = WHOLE[name](*operands)
        torch.testing.assert_close(out.full_tensor(), WHOLE[name](*full))
        found[name] = below.ops
    return found


def test_functions_run_as_a_whole_and_give_what_one_device_gives(ranks):
    for found in ranks(2, _run_whole, list(WHOLE)):
        assert found == {name: [] for name in WHOLE}


def _layouts():
    """What a program sees of a result is the same whether or not it was made as a whole."""
    operands, same = _operands(), {}
    for name, call in WHOLE.items():
        for _ in range(3):
            call(*operands)
        seen = []
        for way in (doors.in_python, Below):
            with way():
                out = call(*operands)
            local = out.to_local()
            seen.append(
                (
                    sw.layout_of(out), out.stride(), out.storage_offset(), out.requires_grad, out.is_leaf,
                    out._version, out._base is None, local.stride(), local.tolist(),
                )
            )  # fmt: skip
        same[name] = seen[0] == seen[1]
    return same


def test_all_that_a_program_sees_of_a_result_is_the_same(ranks):
    for same in ranks(2, _layouts):
        assert same == dict.fromkeys(WHOLE, True)


# --------------------------------------------------------------- what stands between function and op


class _Sees(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class _SeesFunctions(TorchFunctionMode):
    seen: list = []  # noqa: RUF012 - of one test

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


@contextmanager
def _transform():
    torch._C._functorch._grad_increment_nesting()
    try:
        yield
    finally:
        torch._C._functorch._grad_decrement_nesting()


BETWEEN = {
    "a transform": _transform,
    "a mode of ops": _Sees,
    "inference": torch.inference_mode,
    "a cast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a profile": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "derivatives forward": forward_ad.dual_level,
}


def _between(names):
    found = {}
    x, _, w, _ = _operands()
    for _ in range(3):
        x @ w
    for name in names:
        with Below() as below, BETWEEN[name]():
            out = x @ w
        found[name] = below.ops, str(out.dtype)
    with Below() as below:
        x @ w
    found["nothing"] = below.ops, "torch.float32"
    return found


def test_what_stands_between_function_and_op_sees_the_op(ranks):
    (found,) = ranks(1, _between, list(BETWEEN))
    assert found.pop("nothing") == ([], "torch.float32")
    ops, dtype = found.pop("a cast")
    assert ops[-1] == "aten.mm.default"
    assert dtype == "torch.bfloat16"
    assert {dtype for _, dtype in found.values()} == {"torch.float32"}
    assert {name: ops[-1:] for name, (ops, _) in found.items()} == {
        name: ["aten.mm.default"] for name in found
    }


def _beside_a_copied_view():
    base = sw.distribute_tensor(torch.arange(16.0), _mesh(), [sw.Interleaved(0, 2)])
    for _ in range(3):
        base.mul_(2.0)
    view = base[::3]  # each rank had to copy
    with Below() as below:
        base.mul_(2.0)
    return below.ops[:1], torch.equal(view.full_tensor(), torch.arange(16.0)[::3] * 16)


def test_a_view_that_had_to_copy_is_kept_up_to_date(ranks):
    assert ranks(2, _beside_a_copied_view) == [(["aten.mul_.Tensor"], True)] * 2


def _transforms():
    x, y, *_ = _operands()
    full, other, *_ = _full()
    for _ in range(3):
        torch.sin(x)
        x * y
    slope = torch.func.grad(lambda a: (torch.sin(a) * y).sum())(x)
    expected = torch.func.grad(lambda a: (torch.sin(a) * other).sum())(full)
    torch.testing.assert_close(slope.full_tensor(), expected)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, y)
        tangent = forward_ad.unpack_dual(torch.sin(dual)).tangent
    torch.testing.assert_close(tangent.full_tensor(), torch.cos(full) * other)
    _, pushed = torch.func.jvp(torch.sin, (x,), (y,))
    torch.testing.assert_close(pushed.full_tensor(), torch.cos(full) * other)
    return True


def test_transforms_and_forward_derivatives_are_those_of_one_device(ranks):
    assert all(ranks(2, _transforms))


def _functions_are_seen():
    x, *_ = _operands()
    for _ in range(3):
        torch.sin(x)
    with _SeesFunctions() as mode:
        torch.sin(x)
    alone, block = mode.seen[:], sw.spmd(x.device_mesh)
    mode.seen.clear()
    with _SeesFunctions() as around, block:
        torch.sin(x)
    return alone, around.seen


def test_a_mode_of_functions_sees_what_the_program_called_and_no_more(ranks):
    assert ranks(1, _functions_are_seen) == [(["sin"], ["sin"])]


def _rules_and_forgetting():
    from shardwright.rules import registry

    x, *_ = _operands()
    seen, entries = [], []

    def rule():
        entries.append(sw.rule("nameless::whole", "...[dim:_], ...[dim:_] -> ...[dim:_]", later=True))

    try:
        for before in (forget, rule):
            for _ in range(3):
                torch.sin(x)
            before()
            with Below() as below:
                torch.sin(x)
            seen.append(below.ops)
    finally:
        registry.registry.remove(entries[0])
    return seen


def test_a_rule_that_comes_and_forgetting_are_seen(ranks):
    assert ranks(1, _rules_and_forgetting) == [[["aten.sin.default"], ["aten.sin.default"]]]


class _Sub(sw.DTensor):
    """A user's subclass."""


def _gradients():
    full, other, weight, bias = _full()
    results = []
    for place in (True, False):
        values = _operands() if place else (full, other, weight, bias)
        x, y, w, v = (t.detach().clone() for t in values)
        for _ in range(3):
            F.layer_norm(F.linear(x, w, v) * y, (6,), v)  # known without gradients
        w.requires_grad_()
        v.requires_grad_()
        with torch.no_grad():
            silent = F.linear(x, w, v)
        assert silent.grad_fn is None
        assert not silent.requires_grad
        F.layer_norm(F.linear(x, w, v) * y, (6,), v).square().sum().backward()
        results.append([t.grad.full_tensor() if place else t.grad for t in (w, v)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)
    return True


def test_gradients_are_recorded_where_they_are_asked_for(ranks):
    assert all(ranks(2, _gradients))


def _versions():
    """A backward notices that what it saved was written, also through a view and through its base."""
    noticed = []
    for write in (
        lambda x, y: x.add_(y),
        lambda x, y: x[:, 1:3].mul_(2.0),
        lambda x, y: torch._foreach_mul_([x, y], 2.0),
    ):
        x, y, w, _ = _operands()
        for _ in range(3):
            write(x, y)
        before = x._version
        w.requires_grad_()
        out = (x @ w).sum()
        with torch.no_grad():
            write(x, y)
        try:
            out.backward()
            noticed.append("nothing")
        except RuntimeError as error:
            noticed.append("modified by an inplace operation" in str(error))
        assert x._version == before + 1
    return noticed


def test_a_write_is_noticed_by_a_backward_that_saved_the_old_value(ranks):
    assert ranks(2, _versions) == [[True] * 3] * 2


def _writes_are_counted():
    """What is kept of a pending value counts the writes into its storage, by whatever name."""
    x = 1 * sw.DTensor.from_local(torch.ones(4, 4), _mesh(), [sw.Partial()])
    raw = x.data
    for _ in range(3):
        raw.mul_(3)
    with sw.spmd(_mesh()):
        torch.relu(x)
        with Below() as below:
            raw.mul_(3)
        seen = torch.relu(x).full_tensor()
    return below.ops, torch.equal(seen, torch.full((4, 4), 81.0 * torch.distributed.get_world_size()))


def test_a_write_by_another_name_is_counted(ranks):
    assert ranks(2, _writes_are_counted) == [([], True)] * 2


def _kept_by_a_view():
    x, *_ = _operands()
    for _ in range(3):
        x.mul_(1.0)
    view, before = x.t(), x.t()._version
    x.mul_(1.0)
    view.mul_(1.0)
    return x._version == view._version == before + 2


def test_a_view_and_its_base_count_their_writes_together(ranks):
    assert all(ranks(1, _kept_by_a_view))


def _inference_tensors():
    with torch.inference_mode():
        x, y, *_ = _operands()
    for _ in range(3):
        (x * 2).add_(1.0)
    try:
        x.add_(y)
    except RuntimeError as error:
        return "Inplace update to inference tensor" in str(error)
    return False


def test_an_inference_tensor_is_not_written_outside(ranks):
    assert all(ranks(1, _inference_tensors))


def _a_local_tensor_that_requires_a_gradient():
    mesh = _mesh()
    local = torch.ones(4, 6, requires_grad=True)
    spec = sw.DTensor.from_local(torch.ones(4, 6), mesh, [sw.Shard(0)])._spec
    with pytest.warns(UserWarning, match="recommended to use local_tensor.detach"):
        x = sw.DTensor(local, spec, requires_grad=False)
    y = sw.DTensor.from_local(torch.ones(4, 6), mesh, [sw.Shard(0)])
    for _ in range(3):
        y * 2.0
    return (x * 2.0).to_local().requires_grad, x.requires_grad


def test_a_local_tensor_that_requires_a_gradient_begins_no_graph(ranks):
    assert ranks(1, _a_local_tensor_that_requires_a_gradient) == [(False, False)]


def _given_as_it_is():
    """`reshape` and `contiguous` copy or not as on one device, whatever the local strides allow."""
    mesh, told = _mesh(), []
    for call in (
        lambda x: x.contiguous(),
        lambda x: x.reshape(-1),
        lambda x: x.flatten(),
        lambda x: x.float(),
    ):
        for full in (torch.arange(24.0).reshape(4, 6).t(), torch.arange(24.0).reshape(6, 4)):
            x = sw.distribute_tensor(full.clone(), mesh, [sw.Replicate()])
            for _ in range(3):
                out = call(x)
            out.add_(100.0)
            expected = full.clone(memory_format=torch.preserve_format)
            result = call(expected)
            result.add_(100.0)
            told.append(torch.equal(out.full_tensor(), result) and torch.equal(x.full_tensor(), expected))
    return told


def _lies_otherwise():
    """A local tensor that lies in memory otherwise than its layout says is no reason to share it."""
    mesh, told = _mesh(), []
    for call in (lambda x: x.contiguous(), lambda x: x.reshape(-1), lambda x: x.flatten()):
        made = [
            sw.DTensor.from_local(local, mesh, [sw.Replicate()], shape=torch.Size((6, 4)), stride=(1, 6))
            for local in (torch.arange(24.0).reshape(4, 6).t(), torch.arange(24.0).reshape(6, 4))
        ]
        for _ in range(3):
            call(made[0])
        call(made[1]).add_(100.0)
        told.append(torch.equal(made[1].full_tensor(), torch.arange(24.0).reshape(6, 4)))
    return told


def test_local_strides_that_are_others_make_no_alias(ranks):
    assert ranks(1, _lies_otherwise) == [[True] * 3]


def test_what_may_be_its_operand_is_a_copy_where_it_is_one_on_one_device(ranks):
    assert all(all(told) for told in ranks(1, _given_as_it_is))


def _subclass():
    x, y, *_ = _operands()
    for _ in range(3):
        x + y
    ours = _Sub.__new__(_Sub, x._local_tensor, x._spec, requires_grad=False)
    with Below() as below:
        out = ours + y
    return below.ops, torch.equal(out.full_tensor(), (x + y).full_tensor())


def test_a_class_of_the_users_goes_the_way_through_torch(ranks):
    assert ranks(1, _subclass) == [(["aten.add.Tensor"], True)]


def _another_call():
    """Functions that are not the same on local tensors: sizes are given, or a dim is cut."""
    operands, full = _operands(), _full()
    for call in (
        lambda x, y, w, v: x.new_ones((8, 6)),
        lambda x, y, w, v: x.repeat(2, 1),
        lambda x, y, w, v: x.mean(0),
        lambda x, y, w, v: x.cumsum(0),
        lambda x, y, w, v: torch.var(x, 0),
        lambda x, y, w, v: torch.softmax(x, 0),
        lambda x, y, w, v: x.argmax(0),
        lambda x, y, w, v: torch.cat([x, y], 0),
        lambda x, y, w, v: F.group_norm(x, 3),
        lambda x, y, w, v: F.normalize(x, dim=0),
        lambda x, y, w, v: torch.full_like(x, 2.0),
        lambda x, y, w, v: F.mse_loss(x, y),
        lambda x, y, w, v: torch.addmm(v, x, w, beta=0.5),
        lambda x, y, w, v: (x.t() @ y).relu(),
    ):
        for _ in range(3):
            torch.testing.assert_close(call(*operands).full_tensor(), call(*full))
    return True


def test_functions_that_are_another_call_on_local_tensors_go_through_torch(ranks):
    assert all(ranks(2, _another_call))


def _many_numbers():
    x, *_ = _operands()
    full, *_ = _full()
    forget()
    for i in range(100):
        torch.testing.assert_close((x * (i / 7)).full_tensor(), full * (i / 7))
    return len([key for key in whole_functions.whole if key[0] is torch.Tensor.mul])


def test_numbers_that_always_differ_are_not_learned_for_ever(ranks):
    (learned,) = ranks(1, _many_numbers)
    assert 0 < learned <= 16


def _views():
    x, *_ = _operands()
    for _ in range(3):
        x.t()
    with Below() as below:
        view = x.t()
    return below.ops, view._base is x


def test_views_are_made_by_torch(ranks):
    assert ranks(1, _views) == [(["aten.t.default"], True)]


def _first_calls_have_the_users_line():
    x = sw.distribute_tensor(torch.ones(8, 6), _mesh(), [sw.Shard(0)])
    pending = torch.sum(x, 0)
    with sw.spmd(_mesh()), sw.trace() as t:
        torch.relu(pending)
    return ["test_whole_functions.py" in row.source_line for row in t.collectives]


def test_a_first_call_is_listed_under_the_users_line(ranks):
    for lines in ranks(2, _first_calls_have_the_users_line):
        assert lines
        assert all(lines)


FOLDED = {
    "linear": lambda x, w, v: F.linear(x, w),
    "bias": F.linear,
    "matmul": lambda x, w, v: x @ w,
    "tensordot": lambda x, w, v: torch.tensordot(x, x, ([0, 1], [0, 1])),
}


def _folded(cut):
    forget()
    draw = torch.Generator().manual_seed(0)
    full = [torch.randn(size, generator=draw) for size in ((4, 3, 6), (6, 6), (6,))]
    mesh, found = _mesh(), {}
    operands = [sw.distribute_tensor(x, mesh, p) for x, p in zip(full, cut, strict=True)]
    for name, call in FOLDED.items():
        for _ in range(3):
            call(*operands)
        with Below() as below:
            out = call(*operands)
        whole = call(*full)
        torch.testing.assert_close(out.full_tensor(), whole)
        before = [x.full_tensor() for x in operands]
        out.zero_()  # it is nobody's memory
        assert all(torch.equal(x.full_tensor(), y) for x, y in zip(operands, before, strict=True))
        found[name] = below.ops, out.stride() == whole.stride(), out.storage_offset()
    return found


@pytest.mark.parametrize(
    ("cut", "whole"),
    # of what is cut along the dim that is summed, only a linear without a bias sends nothing
    [((0, None, None), set(FOLDED)), ((2, 1, None), {"linear"}), ((None, None, None), set(FOLDED))],
)
def test_views_that_a_function_makes_on_its_way_are_left_out(ranks, cut, whole):
    placed = [[sw.Replicate() if dim is None else sw.Shard(dim)] for dim in cut]
    for found in ranks(2, _folded, placed):
        assert {name for name, (ops, *_) in found.items() if not ops} == whole
        assert {seen[1:] for seen in found.values()} == {(True, 0)}


def _once():
    x, y, *_ = _operands()
    forget()
    with Below() as below:
        x + y
        first = len(whole_functions.whole), len(below.ops)
        x + y
        x + y
    return first, len(whole_functions.whole), len(below.ops)


def test_a_call_is_learned_when_it_comes_again(ranks):
    (found,) = ranks(1, _once)
    assert found == ((0, 1), 1, 2)


def _by_keyword():
    x, _, w, _ = _operands()
    for _ in range(3):
        F.linear(x, weight=w)  # learned
    w.requires_grad_()
    F.linear(x, weight=w).sum().backward()
    full, _, weight, _ = _full()
    F.linear(full, weight.requires_grad_()).sum().backward()
    torch.testing.assert_close(w.grad.full_tensor(), weight.grad)


def test_an_operand_by_keyword_gets_its_gradient(ranks):
    ranks(2, _by_keyword)

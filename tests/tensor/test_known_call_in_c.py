"""Known calls in C: the same answers as in Python, and everything that makes a known call unknown is seen."""

from __future__ import annotations

import gc
import itertools
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
from shardwright.remember import forget
from shardwright.tensor import doors
from shardwright.tensor.dispatch import bindings, short
from shardwright.tensor.plain import boundary
from shardwright.tensor.under_way import ArrivingDTensor

from .hearing import Heard

F = torch.nn.functional
assert sw.DTensor  # the package opens its doors when it is first used
pytestmark = pytest.mark.skipif(not doors.uses_extension(), reason=f"known calls: {doors.why_python()}")


def _mesh():
    world = torch.distributed.get_world_size()
    return sw.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))


def _operands(mesh):
    draw = torch.Generator().manual_seed(0)
    x, y, w, v = (torch.randn(size, generator=draw) for size in ((8, 6), (8, 6), (6, 6), (6,)))
    cut, whole = [sw.Shard(0)], [sw.Replicate()]
    pairs = ((x, cut), (y, cut), (w, whole), (v, whole))
    return [sw.distribute_tensor(value, mesh, placed) for value, placed in pairs]


def _stepped(x, y, step):
    state = [torch.zeros_like(x), torch.zeros_like(x)]
    how = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    p = x.clone()
    lists = [p], [y], [state[0]], [state[1]], [], [step]
    torch._fused_adamw_(*lists, **how, amsgrad=False, maximize=False)
    return [p, *state]


def _written_lists(x, y):
    made = [x.clone(), y.clone()]
    torch._foreach_mul_(made, 3.0)
    torch._foreach_addcmul_(made, [x, y], [y, x], value=0.5)
    torch._foreach_div_(made, [2.0, 4.0])
    return made


CALLS = {
    "add": lambda x, y, w, v: x + y,
    "by a number": lambda x, y, w, v: x * 2.5,
    "mm": lambda x, y, w, v: x @ w,
    "pending": lambda x, y, w, v: torch.sum(x, 0),
    "reshaped": lambda x, y, w, v: x.view(8, 3, 2),
    "transposed": lambda x, y, w, v: x.t(),
    "expanded": lambda x, y, w, v: v.expand(3, 6),
    "sliced": lambda x, y, w, v: x[:, 2:5],
    "view of a later part": lambda x, y, w, v: w[2:].t(),
    "softmax": lambda x, y, w, v: torch.softmax(x, 1),
    "keyword": lambda x, y, w, v: torch.add(x, y, alpha=2),
    "dtype": lambda x, y, w, v: x.to(torch.float64),
    "list": lambda x, y, w, v: torch.cat([x, y], 1),
    "several": lambda x, y, w, v: x.split(2, 1),
    "tuple": lambda x, y, w, v: F.layer_norm(x, (6,), v, v),
    "linear": lambda x, y, w, v: F.linear(x, w, v),
    "written": lambda x, y, w, v: x.clone().add_(y),
    "written by a number": lambda x, y, w, v: x.clone().mul_(2.0),
    "copied": lambda x, y, w, v: x.clone().copy_(y),
    "lists": lambda x, y, w, v: torch._foreach_add([x, y, v], [y, x, v], alpha=2),
    "lists and numbers": lambda x, y, w, v: torch._foreach_mul([x, w], [2.0, 3.0]),
    "lists and a plain number": lambda x, y, w, v: torch._foreach_mul([x, w], torch.tensor(2.0)),
    "norms": lambda x, y, w, v: torch._foreach_norm([w, v]),
    "lists written": lambda x, y, w, v: _written_lists(x, y),
    "fused": lambda x, y, w, v: _stepped(x, y, torch.tensor(1.0)),
    "where": lambda x, y, w, v: torch.where(x > 0, x, y),
}


class InPython:
    """What reaches the functions in Python behind the doors, inside the block.

    calls, functions: ops and functions of torch. depths: in how many functions of torch each op was asked.
    """

    def __enter__(self):
        self.calls, self.functions, self.depths = [], [], []
        self._given = doors.dispatch, boundary.call
        doors.dispatch, boundary.call = self._op, self._function
        doors.open_doors()
        return self

    def _op(self, cls, func, types, args=(), kwargs=None):
        self.calls.append(str(func))
        self.depths.append(boundary.state.functions)
        return self._given[0](cls, func, types, args, kwargs or {})

    def _function(self, cls, func, types, args=(), kwargs=None):
        self.functions.append(func.__name__)
        return self._given[1](cls, func, types, args, kwargs)

    def __exit__(self, *error):
        doors.dispatch, boundary.call = self._given
        doors.open_doors()


def _told(out):
    """All that a program can see of a result."""
    each = out if isinstance(out, list | tuple) else [out]
    return type(out).__name__, [
        (
            sw.layout_of(x),
            x.to_local().tolist(),
            x.to_local().stride(),
            x.stride(),
            x.storage_offset(),
            x.requires_grad,
            x._base is None,
        )
        for x in each
    ]


def _one_way_and_the_other(names):
    mesh = _mesh()
    operands = _operands(mesh)
    found = {}
    for name in names:
        call = CALLS[name]
        for _ in range(3):
            call(*operands)
        with InPython() as python:
            known = _told(call(*operands))
        forget()
        with doors.in_python():
            found[name] = (python.calls + python.functions, known == _told(call(*operands)))
    return found


def test_known_calls_stay_in_c_and_give_what_python_gives(ranks):
    for found in ranks(2, _one_way_and_the_other, list(CALLS)):
        assert found == {name: ([], True) for name in CALLS}


def _gradients():
    mesh = _mesh()
    results = []
    for _ in range(3):
        x, y, w, v = (t.detach().requires_grad_() for t in _operands(mesh))
        out = F.layer_norm(F.linear(x, w, v), (6,), v, v) + y.t().contiguous().t() * 2
        torch.cat([out.view(8, 3, 2).reshape(8, 6), *x.split(2, 1)], 1).square().sum().backward()
        results.append([t.grad.full_tensor() for t in (x, y, w, v)])
    return all(torch.equal(a, b) for later in results[1:] for a, b in zip(results[0], later, strict=True))


def test_gradients_of_known_calls_are_those_of_the_first(ranks):
    assert all(ranks(2, _gradients))


# ------------------------------------------------------------------------------- what makes them unknown


def _python_runs(call, *, before=None, within=None):
    """The ops that reach Python when a known call is made once more, after `before`, inside `within`."""
    for _ in range(3):
        call()
    with InPython() as python:
        call()
        assert python.calls == [], python.calls
        kept = before() if before else None
        if within is None:
            call()
        else:
            with within():
                call()
        del kept
    return python.calls


def _a_rule_comes():
    from shardwright.rules import registry

    x, *_ = _operands(_mesh())
    entries = []

    def rule():
        entries.append(sw.rule("nameless::known", "...[dim:_], ...[dim:_] -> ...[dim:_]", later=True))

    try:
        return _python_runs(lambda: x + x, before=rule)
    finally:
        registry.registry.remove(entries[0])


def test_a_rule_that_comes_is_asked(ranks):
    assert ranks(1, _a_rule_comes) == [["aten.add.Tensor"]]


def _all_is_forgotten():
    x, *_ = _operands(_mesh())
    return _python_runs(lambda: x + x, before=forget)


def test_one_call_forgets_the_recipes_too(ranks):
    assert ranks(1, _all_is_forgotten) == [["aten.add.Tensor"]]


def _a_copied_view_lives():
    mesh = _mesh()
    base = sw.distribute_tensor(torch.arange(16.0), mesh, [sw.Interleaved(0, 2)])
    for _ in range(3):
        base.clone().add_(1)
        base * 2
    view = base[::3]  # each rank had to copy
    with InPython() as python:
        base.add_(1)
        seen = (view * 2).full_tensor()
        view.zero_()
        base_now = base.full_tensor()
    expected = torch.arange(16.0) + 1
    right = torch.equal(seen, expected[::3] * 2)
    expected[::3] = 0
    return "aten.add_.Tensor" in python.calls and right and torch.equal(base_now, expected)


def test_a_view_that_had_to_copy_is_refreshed_and_written_back(ranks):
    assert all(ranks(2, _a_copied_view_lives))


def _a_finished_form_is_known():
    """A pending value that was read twice is finished once; a write makes it be finished anew."""
    mesh = _mesh()
    locals_ = torch.full((4, 4), 1.0 + torch.distributed.get_rank())
    counts, values = [], []
    for _ in range(3):
        x = 1 * sw.DTensor.from_local(locals_, mesh, [sw.Partial()])  # nobody has its memory in his hands
        with sw.spmd(mesh), sw.trace() as t:
            values += [torch.relu(x).full_tensor(), torch.relu(x).full_tensor()]
            x.add_(x)
            values.append(torch.relu(x).full_tensor() / 2)
            other = x.detach()
            other.mul_(2)
            values.append(torch.relu(x).full_tensor() / 4)
        counts.append(len(t.collectives))
    whole = torch.full((4, 4), 3.0)
    return counts, all(torch.equal(value, whole) for value in values)


def test_finished_forms_are_taken_and_lose_their_hold_by_a_write(ranks):
    for counts, right in ranks(2, _a_finished_form_is_known):
        assert counts == [3, 3, 3]
        assert right


def _writes_are_counted():
    """A form that is kept counts the writes into its storage by other names, also those of C."""
    mesh = _mesh()
    x = 1 * sw.DTensor.from_local(torch.ones(4, 4), mesh, [sw.Partial()])
    raw = x.data
    for _ in range(3):
        raw.mul_(3)
    with sw.spmd(mesh):
        torch.relu(x)
        with InPython() as python:
            raw.mul_(3)
            written = [*python.calls]
        seen = torch.relu(x).full_tensor()
    return written, torch.equal(seen, torch.full((4, 4), 81.0 * torch.distributed.get_world_size()))


def test_a_write_through_data_is_counted(ranks):
    for calls, right in ranks(2, _writes_are_counted):
        assert calls == []
        assert right


def test_bindings_are_those_that_call_the_very_op():
    x, aten = torch.ones(2, 3), torch.ops.aten
    assert bindings.binding_of(aten.add.Tensor, (x, x), {}) is torch.add
    assert bindings.binding_of(aten.add.Tensor, (x, x), {"alpha": 2}) is torch.add
    assert bindings.binding_of(aten.add_.Tensor, (x, x), {}) is torch.Tensor.add_
    assert bindings.binding_of(aten._softmax.default, (x, 1, False), {}) is torch._softmax
    assert bindings.binding_of(aten.sum.dim_IntList, (x, [0]), {}) is torch.sum
    assert bindings.binding_of(aten.split.Tensor, (x, 1), {}) is not None
    assert bindings.binding_of(aten.slice.Tensor, (x, 0, 0, 1), {}) is None  # indexing has no function
    assert bindings.binding_of(aten.mul.Scalar, (x, 2.0), {}) is None  # `torch.mul` calls another overload
    assert bindings.binding_of(aten.contiguous.default, (x,), {}) is None  # done without an op
    assert bindings.binding_of(aten.matmul.default, (x, x.t()), {}) is not torch.mm


class _Silent(TorchDispatchMode):
    """Leaves ops on DTensors to these."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return NotImplemented if sw.DTensor in types else func(*args, **(kwargs or {}))


def _a_mode_sees():
    x, *_ = _operands(_mesh())
    return _python_runs(lambda: x + x, within=_Silent)


def test_modes_are_asked_in_python(ranks):
    assert ranks(1, _a_mode_sees) == [["aten.add.Tensor"]]


def _function_modes_hear():
    """What one around a block hears, and one inside of it, as known calls run in C and in Python."""
    mesh = _mesh()
    x, y, *_ = _operands(mesh)
    plain = y.full_tensor()

    def program():
        with torch.no_grad():
            made = [x + y, torch.cat([x, y]), x + plain, torch.add(x, y, alpha=2), x.view(-1), x.sum(0)]
        return [each.full_tensor() for each in made]

    def heard():
        around, within = Heard(), Heard()
        with around, sw.spmd(mesh):
            first = program()
        with sw.spmd(mesh), within:
            second = program()
        same = all(map(torch.equal, first, second))
        return around.names, within.names, same

    in_c = [heard() for _ in range(3)][-1]
    with doors.in_python():
        return in_c, heard()


def test_function_modes_around_a_block_hear_what_they_hear_in_python(ranks):
    for (around, within, same), in_python in ranks(2, _function_modes_hear):
        assert (around, within, same) == in_python
        assert same
        assert {"add", "cat", "view", "sum"} <= set(around)
        assert {"add", "cat", "view", "sum"} <= set(within)


def _a_graph_is_recorded():
    from torch.fx.experimental.proxy_tensor import make_fx

    mesh = _mesh()
    x, y, *_ = _operands(mesh)
    for _ in range(3):
        x * y
    graph = make_fx(lambda a: a * y)(x)
    other = sw.distribute_tensor(torch.full((8, 6), 2.0), mesh, [sw.Shard(0)])
    return torch.equal(graph(other).full_tensor(), 2 * y.full_tensor())


def test_a_recorded_graph_holds_the_op_not_the_values(ranks):
    assert all(ranks(2, _a_graph_is_recorded))


def _compiled():
    mesh = _mesh()
    x, y, w, _ = _operands(mesh)
    for _ in range(3):
        torch.relu(x @ w) + y
    compiled = torch.compile(lambda a, b: torch.relu(a @ w) + b, backend="aot_eager", fullgraph=True)
    first, again = compiled(x, y), compiled(y, x)
    return torch.equal(first.full_tensor(), (torch.relu(x @ w) + y).full_tensor()) and torch.equal(
        again.full_tensor(), (torch.relu(y @ w) + x).full_tensor()
    )


def test_a_known_call_is_compiled_in_one_graph(ranks):
    assert all(ranks(2, _compiled))


def _traced_and_explicit():
    mesh = _mesh()
    x, y, *_ = _operands(mesh)
    columns = y.redistribute({"tp": sw.Shard(1)})
    for _ in range(3):
        x + columns
        x + y
    with sw.trace() as t:
        x + y
        quiet = (len(t.collectives), len(t.decisions))
        x + columns
    loud = len(t.decisions)
    with sw.explicit():
        x + y
        try:
            x + columns
        except sw.errors.RuleError:
            return quiet, loud, "refused"
    return quiet, loud, "run"


def test_trace_lists_and_explicit_refuses_what_moves(ranks):
    for found in ranks(2, _traced_and_explicit):
        assert found == ((0, 0), 1, "refused")


def _part_under_way():
    mesh = _mesh()
    x, *_ = _operands(mesh)
    whole = x.redistribute({"tp": sw.Replicate()})
    for _ in range(3):
        whole * 2
    arriving = x.redistribute({"tp": sw.Replicate()}, async_op=True)
    on_its_way = type(arriving) is ArrivingDTensor
    return on_its_way, torch.equal((arriving * 2).to_local(), whole.to_local() * 2), type(arriving)


def test_a_part_that_is_under_way_is_waited_for(ranks):
    for on_its_way, right, now in ranks(2, _part_under_way):
        assert right
        assert now is sw.DTensor
        assert on_its_way


def _in_inference():
    mesh = _mesh()
    x, *_ = _operands(mesh)
    found = []
    for _ in range(3):
        x.t()
        with torch.inference_mode():
            found.append((x.t().is_inference(), (x + x).is_inference(), x.clone().t().is_inference()))
    return found


def test_views_of_ordinary_tensors_are_ordinary_in_inference_mode(ranks):
    assert ranks(1, _in_inference) == [[(False, True, True)] * 3]


def _after_inference(x):
    """Of views of a tensor of inference mode, taken when it is over: are they, and how is a write refused?"""
    with torch.inference_mode():
        y = x + x
    views = (y.t(), y[0], y[1:3, ::2], y.view(-1), y.diagonal(), y.unfold(0, 2, 1), *y.split(2), *y)
    told = []
    for view in views:
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor") as error:
            view.add_(1)
        told.append(str(error.value))
    return [(view.is_inference(), view.requires_grad) for view in views], told


def _views_after_inference():
    x, *_ = _operands(_mesh())
    plain = torch.ones(8, 6)
    for _ in range(3):
        x.t(), x.view(-1), x[0]
        assert _after_inference(x) == _after_inference(plain)


def test_views_of_tensors_of_inference_mode_are_too_when_it_is_over(ranks):
    ranks(1, _views_after_inference)


def _shares_memory():
    """Written and read at once: refused, or copied first, as on one device."""
    mesh = _mesh()
    x = sw.distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [sw.Replicate()])
    a, b = x.clone(), x.clone()
    for _ in range(3):
        a[1:3].add_(b[0:2])
    told = []
    for read in (slice(0, 2), slice(2, 4)):
        try:
            x[1:3].add_(x[read])
            told.append("")
        except RuntimeError as error:
            told.append("single memory location" in str(error))
    return told


def test_a_write_over_what_is_read_is_for_python(ranks):
    for told in ranks(2, _shares_memory):
        assert told == [True, True]


def _shares_memory_on_one_device_alone():
    """The view's part was replaced: the logical tensors lie over each other, the local ones do not."""
    mesh = _mesh()
    x, *free = (sw.distribute_tensor(torch.ones(4, 4), mesh, [sw.Replicate()]) for _ in range(3))
    for _ in range(3):
        free[0][1:3].add_(free[1][0:2])
    view = x[1:3]
    view._local_tensor = view._local_tensor.clone()
    with pytest.raises(RuntimeError, match="single memory location"):
        view.add_(x[0:2])


def test_what_one_device_refuses_is_refused_where_the_parts_lie_apart(ranks):
    ranks(2, _shares_memory_on_one_device_alone)


def _written_with_itself():
    """A copy of itself asks nothing of memory; what was seen of it says nothing of other copies."""
    mesh = _mesh()
    ones = [sw.distribute_tensor(torch.ones(1, 4), mesh, [sw.Replicate()]) for _ in range(2)]
    one, two = (x.expand(3, 4) for x in ones)
    for _ in range(3):
        one.copy_(one)
    with pytest.raises(sw.errors.RuleError, match="single memory location"):
        one.copy_(two)


def test_a_write_of_a_tensor_into_itself_is_no_example(ranks):
    ranks(1, _written_with_itself)


def _shares_local_memory_alone():
    """Two logical tensors whose parts lie over each other: what is read is what was there."""
    mesh = _mesh()
    memory = torch.arange(6.0)
    one, two, three, four = (
        sw.DTensor.from_local(local, mesh, [sw.Replicate()])
        for local in (memory[0:4], memory[2:6], torch.ones(4), torch.ones(4))
    )
    for _ in range(3):
        three.add_(four)
    with InPython() as python:
        one.add_(two)
    return python.calls, memory.tolist()


def test_parts_that_lie_over_each_other_are_copied_by_python(ranks):
    for calls, memory in ranks(2, _shares_local_memory_alone):
        assert calls == ["aten.add_.Tensor"]
        assert memory == [2.0, 4.0, 6.0, 8.0, 4.0, 5.0]


def _begins():
    """Where views begin on one device: of parts that begin elsewhere, and of views that begin later."""
    mesh = _mesh()
    x, _, w, _ = _operands(mesh)
    columns = x.redistribute({"tp": sw.Shard(1)})
    fresh, later = w[:4].clone(), w[2:]
    for _ in range(3):
        columns[2:5], fresh[1:3], fresh.split(2)
    with InPython() as python:
        known = columns[2:5].storage_offset()
    return known, python.calls, later[1:3].storage_offset(), [x.storage_offset() for x in later.split(2)]


def test_views_begin_where_they_do_on_one_device(ranks):
    assert ranks(2, _begins) == [(12, [], 18, [12, 24])] * 2


def _strides_do_not_merge():
    mesh = _mesh()
    x = sw.distribute_tensor(torch.arange(24.0).view(4, 6), mesh, [sw.Replicate()])
    for _ in range(3):
        x.view(24)
    turned = sw.DTensor.from_local(
        torch.arange(24.0).view(6, 4).t(), mesh, [sw.Replicate()], shape=(4, 6), stride=(6, 1)
    )
    flat = turned.view(24)
    plain = torch.arange(24.0).view(6, 4).t().reshape(24)
    right = torch.equal(flat.full_tensor(), plain)
    flat.add_(1)
    return right and torch.equal(turned.full_tensor().reshape(24), plain + 1)


def test_a_local_view_that_cannot_be_is_a_copy_of_python(ranks):
    assert all(ranks(2, _strides_do_not_merge))


def _numbers_look_alike():
    x = sw.distribute_tensor(torch.arange(4), _mesh(), [sw.Replicate()])
    told = []
    for _ in range(3):
        told.append([(x * value).dtype for value in (2, 2.0, True)])
        told.append([torch.add(x, x, alpha=value).tolist() for value in (1, 2)])
    return told[::2], told[1::2]


NUMBERED = {
    "product": lambda x, y, v: x * v,
    "quotient": lambda x, y, v: x / v,
    "in place": lambda x, y, v: y.mul_(v),
    "between": lambda x, y, v: y.lerp_(x, v),
    "quotient added": lambda x, y, v: y.addcdiv_(x, x + 2, value=v),
    "sum": lambda x, y, v: torch.add(x, y, alpha=v),
}


def _other_numbers():
    """What reached Python of calls with numbers never seen, of hundreds; every value compared."""
    whole = torch.linspace(0.5, 2.0, 8)
    reached = {}
    for name, op in NUMBERED.items():
        x, y = (sw.distribute_tensor(whole.clone(), _mesh(), [sw.Shard(0)]) for _ in range(2))
        expected = whole.clone()
        with torch.no_grad():
            for step in range(4):
                op(x, y, 0.5 + step / 100)
                op(whole, expected, 0.5 + step / 100)
            with InPython() as python:
                for step in range(200):
                    number = 0.9 + step / 1024
                    assert torch.equal(op(x, y, number).full_tensor(), op(whole, expected, number)), name
            reached[name] = [of for of in python.calls if "all_gather" not in str(of)]
    return reached


def test_a_number_that_was_never_seen_makes_no_new_call(ranks):
    for reached in ranks(2, _other_numbers):
        assert reached == {name: [] for name in NUMBERED}


def _numbers_of_pending():
    """Filled with zeros a sum may stay pending, filled with anything else it has to be finished."""
    whole = torch.arange(8.0).view(2, 4)
    x, mask = (
        sw.distribute_tensor(value, _mesh(), [placed])
        for value, placed in ((whole, sw.Shard(0)), (whole.sum(0) > 5, sw.Replicate()))
    )
    with torch.no_grad():
        for value in (0.0, 0.0, 1.0, 0.0, 2.0, -1.0):
            pending = x.sum(0)
            assert pending.placements[0].is_pending
            found = pending.masked_fill(mask, value).full_tensor()
            assert torch.equal(found, whole.sum(0).masked_fill(whole.sum(0) > 5, value)), value


def test_numbers_decide_of_pending_values(ranks):
    ranks(2, _numbers_of_pending)


def test_numbers_of_other_types_are_other_calls(ranks):
    for dtypes, values in ranks(1, _numbers_look_alike):
        assert dtypes == [[torch.int64, torch.float32, torch.int64]] * 3
        assert values == [[[0, 2, 4, 6], [0, 3, 6, 9]]] * 3


def _errors():
    mesh = _mesh()
    x, *_ = _operands(mesh)
    told = []
    for _ in range(2):
        for call in (lambda: x.view(7, 7), lambda: x + torch.ones(8, 6), lambda: x @ x):
            try:
                call()
            except RuntimeError as error:
                told.append((type(error).__name__, str(error).splitlines()[0]))
        forget() if _ else x.view(48)
    return told[: len(told) // 2] == told[len(told) // 2 :], len(told)


def test_errors_are_those_of_python(ranks):
    assert ranks(1, _errors) == [(True, 6)]


def _in_threads():
    mesh = _mesh()
    x, y, w, _ = _operands(mesh)
    expected = torch.cat([x.to_local() + y.to_local(), x.to_local() @ w.to_local()], 1)
    wrong = []

    def work():
        for turn in range(300):
            out = torch.cat([x + y, x @ w], 1)
            if not torch.equal(out.to_local(), expected):
                wrong.append(turn)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        forget()
    for thread in threads:
        thread.join()
    return wrong


def test_threads_and_forgetting_do_not_disturb_each_other(ranks):
    assert ranks(1, _in_threads) == [[]]


def _what_stays():
    """Objects that are alive, and references to those that every call touches, after many calls."""
    import sys

    mesh = _mesh()
    operands = _operands(mesh)
    x, y, *_ = operands
    target = x.clone()

    def every_call():
        target.copy_(y).mul_(2.0).add_(y)
        for call in CALLS.values():
            call(*operands)
        for wrong in (lambda: x.view(7, 7), lambda: x @ x, lambda: x + torch.ones(3, 3)):
            with pytest.raises(RuntimeError):
                wrong()

    def held():
        gc.collect()
        touched = [x, y, target, x._spec, x._spec.token, x._local_tensor, sw.DTensor, None, short.Short, ()]
        for table in (short.recipes, short.lists):
            touched += [part for key, recipe in table.items() for part in (recipe, *key, *(recipe or ()))]
        return [sys.getrefcount(value) for value in touched], len(gc.get_objects())

    forget()  # what other tests left in the tables would be let go meanwhile
    for _ in range(5):
        every_call()
    seen = [held()]
    for _ in range(3):
        for _ in range(100):
            every_call()
        seen.append(held())
    counts = zip(*(references for references, _ in seen), strict=True)
    grown = [[after - before for before, after in itertools.pairwise(each)] for each in counts]
    # What each call loses or keeps is a hundred in every round; what a table lets go once is no loss.
    return [each for each in grown if min(each) >= 95 or max(each) <= -95], seen[-1][1] - seen[-2][1]


def test_no_reference_is_lost_or_kept(ranks):
    for grown, objects in ranks(1, _what_stays):
        assert grown == []
        assert objects < 100


# Calls around which more stands than C asks for, and the op that Python must see each time.
AROUND = {
    "aten._linalg_det.default": lambda w, v: torch.linalg.det(w),
    "aten.median.default": lambda w, v: w.median(),
    "aten.cat.default": lambda w, v: torch.cat([v, v[:0]]),
    "aten.t_.default": lambda w, v: w.clone().t_(),
    "aten.native_batch_norm.default": lambda w, v: F.batch_norm(w, v.clone(), v.clone(), training=True),
}


def _around():
    *_, w, v = _operands(_mesh())
    found = {}
    for name, call in AROUND.items():
        for _ in range(3):
            call(w, v)
        with InPython() as python:
            call(w, v)
        found[name] = name in python.calls
    return found


def test_an_op_that_asks_more_of_each_call_is_for_python(ranks):
    for found in ranks(1, _around):
        assert found == dict.fromkeys(AROUND, True)


def _holds_nothing():
    x = sw.distribute_tensor(torch.tensor([[1.0, 2.0]]), _mesh(), [sw.Shard(0)])
    return [torch.amax(x, 0).full_tensor().tolist() for _ in range(4)]


def test_a_rank_that_holds_nothing_calls_no_kernel(ranks):
    assert ranks(2, _holds_nothing) == [[[1.0, 2.0]] * 4] * 2


# ------------------------------------------------------------------------------------------ the boundary

# Functions that Python judges or does in its own way, and what one device gives.
JUDGED = {
    "a plain tensor": (lambda x, y: x + torch.ones(1), lambda x, y: x + 1),
    "in a list": (
        lambda x, y: torch.cat([x[0], torch.ones(1)]),
        lambda x, y: torch.cat([x[0], torch.ones(1)]),
    ),
    "out": (lambda x, y: torch.add(x, y, out=torch.empty_like(x)), torch.add),
    "read to the host": (lambda x, y: torch.tensor(x.tolist()), lambda x, y: x),
    "of sizes": (lambda x, y: torch.tensor(torch.is_same_size(x, y)), lambda x, y: torch.tensor(True)),
}


def _judged():
    x, y, *_ = _operands(_mesh())
    plain = x.full_tensor(), y.full_tensor()
    found = {}
    for name, (call, of_plain) in JUDGED.items():
        call(x, y)
        with InPython() as python:
            out = call(x, y)
        whole = out.full_tensor() if isinstance(out, sw.DTensor) else out
        found[name] = (bool(python.functions), torch.equal(whole, of_plain(*plain)))
    return found


def test_what_the_boundary_judges_is_for_python(ranks):
    for found in ranks(2, _judged):
        assert found == dict.fromkeys(JUDGED, (True, True))


def _while_torch_traces():
    x, *_ = _operands(_mesh())
    x + x
    torch.compiler._is_compiling_flag = True
    try:
        with InPython() as python:
            x + x
    finally:
        torch.compiler._is_compiling_flag = False
    return python.functions


def test_a_trace_of_torch_is_for_python(ranks):
    assert ranks(1, _while_torch_traces) == [["add"]]


def _depth():
    x, *_ = _operands(_mesh())
    x + x
    forget()
    with InPython() as python:
        x + x
        with pytest.raises(RuntimeError):
            x.view(7, 7)
        torch.ops.aten.mul.Tensor(x, x)
    return python.functions, python.depths, boundary.state.functions


def test_how_deep_in_functions_of_torch_a_call_is_stays_known(ranks):
    """Plain tensors that torch makes inside of its functions count as replicated, those of a user do not."""
    ((functions, depths, left),) = ranks(1, _depth)
    assert "add" in functions  # the classes of its arguments are forgotten too
    assert set(depths) == {1}
    assert left == 0


def _plain_results():
    """torch makes the rank of a matrix without elements of none of its operands' data."""
    empty = sw.distribute_tensor(torch.empty(0, 3), _mesh(), [sw.Replicate()])
    found = [torch.linalg.matrix_rank(empty) for _ in range(2)]
    return [type(x) is sw.DTensor for x in found]


def test_a_plain_result_is_the_same_on_every_rank(ranks):
    assert ranks(1, _plain_results) == [[True, True]]


# ------------------------------------------------------------------------------------------- on and off


def test_a_variable_turns_it_off(monkeypatch):
    monkeypatch.setenv("SHARDWRIGHT_EXTENSION", "0")
    assert doors.open_doors() == "SHARDWRIGHT_EXTENSION=0 turns it off"
    try:
        assert not doors.uses_extension()
        assert type(vars(sw.DTensor)["__torch_dispatch__"]) is classmethod
    finally:
        monkeypatch.undo()
        assert doors.open_doors() == ""
    assert doors.uses_extension()


def test_one_that_was_built_for_other_recipes_is_not_used(monkeypatch):
    from shardwright.tensor.extension import known_call

    for name in ("FIELDS", "VERSION"):
        with monkeypatch.context() as patched:
            patched.setattr(known_call, name, 1)
            assert doors.why_python() == "it was built from another version of the library"


def test_a_torch_whose_tensors_have_no_slots_is_served_by_python(monkeypatch):
    monkeypatch.setattr(doors, "_slots", lambda: (property(), None))
    assert doors.why_python() == "this torch keeps the parts of a DTensor otherwise"


def test_who_looks_at_the_doors_finds_the_functions_in_python():
    """torch._dynamo reads `__torch_function__` from the class, and inlines the function that it finds."""
    door = vars(sw.DTensor)["__torch_function__"]
    assert isinstance(door, classmethod)
    assert door.__func__ is boundary.call


def _a_localized_parameter():
    """Beside its state an operand like others; beside a plain tensor, or on another mesh, its local part."""
    from shardwright.parallel import parallelize_replicate
    from shardwright.testing import rank_mesh

    mesh = rank_mesh((2, 1), ("dp", "tp"))
    model = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.ones_(model.weight)
    parallelize_replicate(model, mesh["dp"])
    state = model.weight.detach() * 2.0
    with torch.no_grad():
        for _ in range(3):
            model.weight.mul_(state)
        with InPython() as python:
            model.weight.mul_(state)
            calls = [*python.calls]
    elsewhere = sw.distribute_tensor(torch.ones(4, 4), mesh["tp"], [sw.Replicate()])
    arriving = sw.distribute_tensor(torch.ones(4, 4), mesh["tp"], [sw.Shard(0)])
    made = [model.weight @ torch.ones(4, 4)]
    with sw.spmd(mesh["tp"]):
        made += [
            model.weight @ elsewhere,
            model.weight @ arriving.redistribute([sw.Replicate()], async_op=True),
        ]
    whole = [x.full_tensor() if isinstance(x, sw.DTensor) else x for x in made]
    return calls, [type(x) is torch.Tensor for x in made], [bool((x == 64.0).all()) for x in whole]


def test_a_localized_parameter_meets_its_state_in_c(ranks):
    for calls, plain, right in ranks(2, _a_localized_parameter):
        assert calls == []
        assert plain == [True, False, False]
        assert right == [True] * 3


class _CountLocalized:
    """How often the function in Python behind the door of localized parameters runs inside the block."""

    def __enter__(self):
        self.functions, self._given = [], doors.call_localized
        doors.call_localized = self._call
        doors.open_doors()
        return self

    def _call(self, cls, func, types, args=(), kwargs=None):
        self.functions.append(func.__name__)
        return self._given(cls, func, types, args, kwargs)

    def __exit__(self, *error):
        doors.call_localized = self._given
        doors.open_doors()


MIXED = {
    "linear": F.linear,
    "no bias": lambda x, w, v: F.linear(x, w, None),
    "keyword": lambda x, w, v: F.linear(input=x, weight=w, bias=v),
    "sizes": lambda x, w, v: F.layer_norm(x, (4,), v, bias=v),
    "sizes of a list": lambda x, w, v: F.rms_norm(x, [4], v),
    "words": lambda x, w, v: torch.einsum("ij,kj->ik", x, w),
    "number": lambda x, w, v: torch.add(x, v, alpha=3),
    "the parameter first": lambda x, w, v: v * x,
    "one of a list": lambda x, w, v: torch.cat([x, w]),
    "a look-up": lambda x, w, v: F.embedding(torch.tensor([0, 2, 2]), w),
}
IN_PYTHON = {"one of a list", "a look-up"}


def _mixed(names):
    from shardwright.parallel import parallelize_replicate
    from shardwright.testing import rank_mesh

    draw = torch.Generator().manual_seed(0)
    w, v, x = (torch.randn(size, generator=draw) for size in ((4, 4), (4,), (3, 4)))
    plain = torch.nn.ParameterList([w.clone(), v.clone()])
    model = parallelize_replicate(torch.nn.ParameterList([w, v]), rank_mesh((2,), ("dp",)))
    found = {}
    for name in names:
        call, inputs = MIXED[name], [x.clone().requires_grad_() for _ in range(2)]
        right = torch.autograd.grad(
            call(inputs[0], *plain).square().sum(), [inputs[0], *plain], allow_unused=True
        )
        for _ in range(2):
            call(inputs[1], *model)
        with _CountLocalized() as python:
            out = call(inputs[1], *model)
        given = torch.autograd.grad(out.square().sum(), [inputs[1], *model], allow_unused=True)
        assert type(out) is torch.Tensor, name
        for own, one_device in zip(given, right, strict=True):
            assert (own is None) == (one_device is None), name
            if own is not None:  # each rank's term is of all rows
                local = own.to_local() if isinstance(own, sw.DTensor) else own
                torch.testing.assert_close(local, one_device, msg=name)
        found[name] = bool(python.functions)
    return found


def test_a_localized_parameter_meets_plain_tensors_in_c(ranks):
    for found in ranks(2, _mixed, [*MIXED]):
        assert {name for name, python in found.items() if python} == IN_PYTHON


def _pending_beside_plain():
    """Spread experts: a sum over them is pending on their axis, and finished beside plain tensors."""
    from shardwright.parallel.place import place_parameters
    from shardwright.testing import rank_mesh

    x = torch.ones(4)
    w = torch.arange(8.0).view(2, 4)
    model = torch.nn.ParameterList([w.clone()])
    place_parameters(model, rank_mesh((2,), ("ep",)), (sw.Shard(0),), ())
    for _ in range(3):
        model[0] * x
    for _ in range(3):
        torch.testing.assert_close(model[0].sum(0) * x, w.sum(0))


def test_a_pending_value_of_a_parameter_is_finished_before_it_meets_plain_tensors(ranks):
    ranks(2, _pending_beside_plain)


def _mixed_often():
    """References to what a mixed call takes and gives, before and after many of them."""
    from shardwright.parallel import parallelize_replicate
    from shardwright.testing import rank_mesh

    model = parallelize_replicate(torch.nn.Linear(4, 4), rank_mesh((1,), ("dp",)))
    x = torch.ones(2, 4)
    import sys

    held = [x, model.weight, model.bias, model.weight._spec, model.weight._local_tensor, None, F.linear]

    def seen():
        gc.collect()
        return [sys.getrefcount(value) for value in held]

    def calls():
        for _ in range(200):
            model(x)
            F.layer_norm(x, (4,), weight=model.bias)
            with pytest.raises(RuntimeError):
                F.linear(x[:, :3], model.weight)

    calls()
    before = seen()
    calls()
    return [after - at_first for after, at_first in zip(seen(), before, strict=True)]


def test_mixed_calls_hold_nothing(ranks):
    for grown in ranks(1, _mixed_often):
        assert max(map(abs, grown)) < 50


def _max_norm():
    from shardwright.errors import RuleError
    from shardwright.parallel import parallelize_replicate
    from shardwright.testing import rank_mesh

    model = torch.nn.Embedding(4, 4, max_norm=1.0)
    parallelize_replicate(model, rank_mesh((2,), ("dp",)))
    ids = sw.distribute_tensor(torch.tensor([0, 1]), model.weight.device_mesh, [sw.Replicate()])
    for _ in range(3):
        with pytest.raises(RuleError, match="max_norm"):
            model(ids)


def test_a_lookup_that_writes_is_for_python(ranks):
    ranks(2, _max_norm)

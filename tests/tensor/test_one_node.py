"""Layers as one node of the graph of gradients: values of one device, and who looks sees the ops."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.remember import forget
from shardwright.tensor import doors
from shardwright.tensor.dispatch import one_node

F = torch.nn.functional
assert sw.DTensor  # the package opens its doors when it is first used
pytestmark = pytest.mark.skipif(not doors.uses_extension(), reason=f"known calls: {doors.why_python()}")

S, R, P = sw.Shard, sw.Replicate, sw.Partial
# shape of the rows, their placement, that of the weight and of the bias; may it be one node?
LAYERS = {
    "rows": ((8, 6), S(0), R(), None, True),
    "uneven rows": ((7, 3, 6), S(0), R(), R(), False),
    "columns": ((2, 4, 6), R(), S(0), None, True),
    "columns, bias": ((2, 4, 6), R(), S(0), S(0), True),
    "inner": ((2, 4, 6), S(2), S(1), None, True),
    "four dims": ((2, 2, 3, 6), S(1), R(), R(), True),
    "whole": ((5, 6), R(), R(), R(), True),
    "moves": ((8, 6), S(0), S(0), None, False),
    "pending": ((8, 6), P(), R(), None, False),
    "one row": ((1, 6), S(0), R(), None, False),
    "vector": ((6,), R(), S(0), None, False),
}


def _mesh():
    return sw.init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))


def _full(shape, bias):
    draw = torch.Generator().manual_seed(0)
    sizes = (shape, (8, 6), (8,)) if bias else (shape, (8, 6))
    return [torch.randn(size, generator=draw, dtype=torch.float64).requires_grad_() for size in sizes]


def _placed(full, mesh, placements):
    placed = []
    for x, p in zip(full, placements, strict=False):
        made = sw.distribute_tensor(x.detach(), mesh, [p if p != P() else R()])
        placed.append((made.redistribute(placements=[P()]) if p == P() else made).detach().requires_grad_())
    return placed


def _first_and_second(operands, seed, function=F.linear):
    """The result, its gradients, and the gradients of a penalty on these."""
    y = function(*operands)
    grads = torch.autograd.grad(y.pow(3).sum() / 7, operands, create_graph=True)
    again = torch.autograd.grad(sum(g.square().sum() for g in grads), operands)
    batch = torch.autograd.grad(
        function(*operands), operands, torch.stack([seed, seed]), is_grads_batched=True
    )
    plain = torch.autograd.grad(function(*operands), operands, seed)
    return [y, *grads, *again, *batch, *plain], y.grad_fn.name()


def _layers():
    mesh = _mesh()
    forget()
    for name, (shape, rows, weight, bias, is_node) in LAYERS.items():
        full = _full(shape, bias)
        placed = _placed(full, mesh, (rows, weight, bias))
        seed = torch.randn(
            F.linear(*full).shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        expected, _ = _first_and_second(full, seed)
        for _ in range(3):
            found, node = _first_and_second(placed, sw.distribute_tensor(seed, mesh, [R()]))
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours.full_tensor(), theirs)
                assert ours.stride() == theirs.stride()
        assert (node == "LinearBackward") == is_node, (name, node)


def test_values_and_first_and_second_gradients_are_those_of_one_device(ranks):
    ranks(2, _layers)


# shape of the rows and of what is normed, the rows' placement, has it a weight?; may it be one node?
NORMS = {
    "rows": ((8, 6), (6,), S(0), True, True),
    "tokens": ((2, 4, 6), (6,), S(1), True, True),
    "two dims": ((4, 3, 2), (3, 2), S(0), True, True),
    "whole, no weight": ((5, 6), (6,), R(), False, True),
    "cut": ((4, 6), (6,), S(1), True, False),
    "pending where ranks may do other things": ((4, 6), (6,), P(), True, False),
    "one row": ((1, 6), (6,), S(0), True, False),
}


def _norms():
    mesh, draw = _mesh(), torch.Generator().manual_seed(0)
    forget()
    for name, (shape, normed, rows, weighs, is_node) in NORMS.items():
        sizes = (shape, normed) if weighs else (shape,)
        full = [torch.randn(size, generator=draw, dtype=torch.float64).requires_grad_() for size in sizes]
        placed = _placed(full, mesh, (rows, R()))
        seed = torch.randn(shape, generator=draw, dtype=torch.float64)

        def norm(x, weight=None, normed=normed):
            return nn.functional.rms_norm(x, normed, weight, eps=1e-3)

        expected, _ = _first_and_second(full, seed, norm)
        for _ in range(3):
            found, node = _first_and_second(placed, sw.distribute_tensor(seed, mesh, [R()]), norm)
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours.full_tensor(), theirs)
                assert ours.stride() == theirs.stride()
        assert (node == "RmsNormBackward") == is_node, (name, node)


def test_norms_and_their_first_and_second_gradients_are_those_of_one_device(ranks):
    ranks(2, _norms)


def _stream(x, a, weight):
    """A value that is read by a norm first, and beside it: of rows that are cut, a pending one."""
    h = x @ a
    normed = nn.functional.rms_norm(h, (6,), weight)
    nodes.append(normed.grad_fn.name())
    return h + normed.tanh()


nodes = []


def _of_pending_values():
    mesh, draw = _mesh(), torch.Generator().manual_seed(0)
    forget()
    sizes = ((4, 8), (8, 6), (6,))
    full = [torch.randn(size, generator=draw, dtype=torch.float64).requires_grad_() for size in sizes]
    seed = torch.randn(4, 6, generator=draw, dtype=torch.float64)
    expected, _ = _first_and_second(full, seed, _stream)
    operands = _placed(full, mesh, (S(1), S(0), R()))
    sent = []
    for inside in (True, True, True, False, True):
        nodes.clear()
        with sw.spmd(mesh) if inside else contextlib.nullcontext():
            found, _ = _first_and_second(operands, sw.distribute_tensor(seed, mesh, [R()]), _stream)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs)
        sent.append(nodes[-1])
    with sw.spmd(mesh), sw.trace() as trace:
        h = operands[0] @ operands[1]
        normed = nn.functional.rms_norm(h, (6,), operands[2])
        assert "Partial(sum)" in str(h.placements)
    finished = [event.op for event in trace.collectives]
    with torch.no_grad():
        h.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        normed.sum().backward()
    return sent, len(finished)


def test_a_norm_of_a_pending_value_reads_its_finished_form_where_that_is_kept(ranks):
    for sent, finished in ranks(2, _of_pending_values):
        assert sent[2] == sent[4] == "RmsNormBackward"
        assert sent[3] != "RmsNormBackward"
        assert finished == 1


def _down_and_up():
    """What a backward finishes for a layer's first product the second one reads, unless it is followed."""
    mesh, draw = _mesh(), torch.Generator().manual_seed(0)
    shapes, places = ((2, 4, 6), (8, 6), (6, 8), (8, 6)), (R(), S(0), S(1), S(0))
    full = [
        torch.randn(shape, generator=draw, dtype=torch.float64).mul_(0.5).requires_grad_() for shape in shapes
    ]

    def derivatives(x, up, down, again):
        y = F.linear(F.linear(F.linear(x, up).tanh(), down), again).square().sum()
        grads = torch.autograd.grad(y, (x, up, down, again), create_graph=True)
        twice = torch.autograd.grad(sum(g.square().sum() for g in grads), (x, up, down, again))
        return [y, *grads, *twice]

    expected = derivatives(*full)
    with sw.spmd(mesh):
        for _ in range(3):  # first, met again, known
            found = derivatives(*_placed(full, mesh, places))
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one.full_tensor(), other)


def test_a_layer_whose_gradient_was_finished_has_second_gradients(ranks):
    ranks(2, _down_and_up)


def _of_rows_that_are_cut():
    """What learning runs once more it does not send once more."""
    mesh, draw = (
        sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
        torch.Generator().manual_seed(0),
    )
    forget()
    x = sw.distribute_tensor(torch.randn(4, 6, generator=draw), mesh, [R(), S(1)]).requires_grad_()
    sent = []
    for _ in range(4):
        with sw.spmd(mesh), sw.trace() as trace:
            nn.functional.rms_norm(x.redistribute(placements=[P(), S(1)]), (6,))
        sent.append(len(trace.collectives))
    return sent


def test_to_learn_a_call_sends_nothing(ranks):
    for sent in ranks(4, _of_rows_that_are_cut):
        assert sent[0] > 0
        assert sent[0] == sent[1] == sent[2] == sent[3]


def _called_by_names():
    mesh, draw = _mesh(), torch.Generator().manual_seed(0)
    forget()
    full = [torch.randn(size, generator=draw).requires_grad_() for size in ((2, 4, 6), (6, 6), (6,))]
    x, weight, bias = _placed(full, mesh, (R(), S(0), S(0)))
    for _ in range(3):
        y = F.linear(x, bias=bias, weight=weight)
    torch.testing.assert_close(y.full_tensor(), F.linear(*full))
    rows = x.detach().bfloat16().requires_grad_()
    for _ in range(3):
        normed = nn.functional.rms_norm(rows, (6,))
    return y.grad_fn.name(), normed.grad_fn.name()


def test_calls_by_names_in_any_order_and_norms_in_a_wider_type(ranks):
    for linear, norm in ranks(2, _called_by_names):
        assert linear == "LinearBackward"
        assert norm != "RmsNormBackward"


def _known(shape=(4, 2, 6), **wanted):
    """Operands of a layer that is known as one node."""
    mesh = _mesh()
    operands = _placed(_full(shape, None), mesh, (R(), S(0)))
    for _ in range(3):
        y = F.linear(*operands)
    assert y.grad_fn.name() == "LinearBackward"
    for x, wants in zip(operands, wanted.values(), strict=False):
        x.requires_grad_(wants)
    return operands


class _Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops = [*getattr(self, "ops", ()), str(func)]
        return func(*args, **(kwargs or {}))


def _looked_at():
    x, w = _known()
    with _Seen() as seen:
        assert F.linear(x, w).grad_fn.name() != "LinearBackward"
    assert "aten.mm.default" in seen.ops
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        F.linear(x, w)
    full = _full((4, 2, 6), None)
    theirs = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: theirs.append(t) or t, lambda t: t):
        F.linear(*full)
    assert [t.shape for t in packed] == [t.shape for t in theirs]
    with torch.autocast("cpu", torch.bfloat16):
        assert F.linear(x.detach().float().requires_grad_(), w.float()).dtype == torch.bfloat16
    made = torch.func.grad(lambda a: F.linear(a, w).square().sum())(x)
    torch.testing.assert_close(
        made.full_tensor(), torch.func.grad(lambda a: F.linear(a, full[1]).square().sum())(full[0])
    )


def test_whoever_looks_at_ops_or_at_what_is_saved_sees_them(ranks):
    ranks(2, _looked_at)


def _recomputed():
    """A forward that is recomputed saves what it saved before, whatever was learned meanwhile."""
    mesh, draw = _mesh(), torch.Generator().manual_seed(0)
    forget()
    full = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).double()
    with torch.no_grad():
        for p in full.parameters():
            p.copy_(torch.randn(p.shape, generator=draw, dtype=torch.float64))
    x = torch.randn(4, 6, generator=draw, dtype=torch.float64)
    ours = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).double()
    ours.load_state_dict(full.state_dict())
    sw.distribute_module(ours, mesh, {"0.*": {"tp": S(0)}, "2.weight": {"tp": S(1)}})
    full(x).square().sum().backward()
    for turn in range(4):
        ours.zero_grad()
        placed = sw.distribute_tensor(x, mesh, [R()])
        inner = checkpoint(ours, placed, use_reentrant=False) if turn % 2 else ours(placed)
        inner.square().sum().backward()
        for p, q in zip(ours.parameters(), full.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)


def test_a_checkpointed_forward_fits_its_recomputation(ranks):
    ranks(2, _recomputed)


def _what_is_wanted():
    made = []

    def noted(place, gradient):
        return lambda grad, given: made.append(place) or gradient(grad, given)

    real = one_node._GRADIENTS
    one_node._GRADIENTS = tuple(noted(i, each) for i, each in enumerate(real))
    try:
        x, w = _known()
        torch.autograd.grad(F.linear(x, w).sum(), x)
        F.linear(x, w).sum().backward(inputs=[w])
        x, w = _known(x=True, w=False)
        y = F.linear(x, w)
        saved = y.grad_fn.saved_tensors
        y.sum().backward()
    finally:
        one_node._GRADIENTS = real
    return made, [t is None for t in saved], x.grad is None, w.grad is None


def test_only_gradients_that_are_wanted_are_made_and_saved_for(ranks):
    for found in ranks(2, _what_is_wanted):
        assert found == ([0, 1, 0], [True, False], False, True)


def _written():
    x, w = _known()
    inner = x * 1
    y = F.linear(inner, w)
    assert y.grad_fn.name() == "LinearBackward"
    inner.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    full = _full((4, 2, 6), None)
    for a, b in ((x, w), full):
        y = F.linear(a, b)
        y.mul_(3).relu_()
        y.sum().backward()
    for ours, theirs in zip((x, w), full, strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_writes_into_what_it_saved_are_noticed_and_into_its_result_followed(ranks):
    ranks(2, _written)

"""Known calls on values that were finished before, and on finished ones that become terms: in C."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from shardwright.tensor import doors
from shardwright.tensor.dispatch import short
from shardwright.testing.meshes import rank_mesh

from .test_known_call_in_c import InPython

pytestmark = pytest.mark.skipif(not doors.uses_extension(), reason=f"known calls: {doors.why_python()}")

F = torch.nn.functional


def _whole(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _pending(mesh, value):
    """Terms of the value, which nobody has in his hands."""
    share = value / 4 if mesh.get_local_rank() else value * (1 - (dist.get_world_size() - 1) / 4)
    return 1 * sw.DTensor.from_local(share, mesh, [sw.Partial()])


READS = {
    "by itself": torch.exp,
    "beside a number": lambda x: x.pow(2),
    "twice in one call": lambda x: x * x,
    "in a list": lambda x: torch.stack([x, x.exp()]),
    "as a keyword": lambda x: torch.clamp(x, min=x * x),
    "over a dim": lambda x: torch.softmax(x, 1),
}


def _read_again():
    mesh = rank_mesh((dist.get_world_size(),))
    whole = _whole(4, 6)
    found = {}
    with sw.spmd(mesh):
        for name, read in READS.items():
            for _ in range(3):
                x = _pending(mesh, whole)
                x.sin(), read(x)
            x = _pending(mesh, whole)
            x.sin()
            with InPython() as python:
                out = read(x)
            torch.testing.assert_close(out.full_tensor(), read(whole), msg=name)
            found[name] = python.calls
    return found


def test_what_was_finished_is_read_again_in_c(ranks):
    for found in ranks(2, _read_again):
        assert found == {name: [] for name in READS}


def _views_of_one_value():
    """Two views are taken of a value, then both are read: the second finds what the first made."""
    mesh = rank_mesh((dist.get_world_size(),))
    whole, weight = _whole(2, 4, 6), _whole(6, 6)
    w = sw.distribute_tensor(weight, mesh, [sw.Shard(1)])
    for round_ in range(4):
        with sw.spmd(mesh):
            x = _pending(mesh, whole)
            one, two = x.view(8, 6), x.view(8, 6)
            with sw.trace() as seen:
                first = one @ w
            sent = len(seen.collectives)
            with InPython() as python:
                second = two @ w
            with sw.trace() as again:
                two @ w
            for out in (first, second):
                torch.testing.assert_close(out.full_tensor(), whole.view(8, 6) @ weight)
        assert sent == 1
        assert not again.collectives
        assert any("finished before" in str(each) for each in again.decisions), again.decisions
        if round_ == 3:
            return python.calls
    return None


def test_a_view_finds_what_another_view_was_finished_for(ranks):
    assert ranks(2, _views_of_one_value) == [[], []]


def _writes_between():
    mesh = rank_mesh((dist.get_world_size(),))
    whole = _whole(4, 6)
    writes = {
        "the value": lambda x, _: x.mul_(2),
        "a view of it": lambda _, view: view.mul_(2),
        "its data": lambda x, _: x.data.mul_(2),
        "lists": lambda x, _: torch._foreach_mul_([x], 2.0),
    }
    with sw.spmd(mesh):
        for name, write in writes.items():
            for _ in range(4):
                x = _pending(mesh, whole)
                view = x.view(24)
                torch.exp(view), torch.exp(x)
                write(x, view)
                torch.testing.assert_close(torch.exp(x).full_tensor(), (2 * whole).exp(), msg=name)
                torch.testing.assert_close(
                    torch.exp(view).full_tensor(), (2 * whole).exp().view(24), msg=name
                )


def test_a_write_ends_what_was_finished(ranks):
    ranks(2, _writes_between)


def _what_stays():
    """Counts of references and objects after reads of finished forms, of values without one, and sums."""
    mesh = rank_mesh((dist.get_world_size(),))
    whole = _whole(4, 6)
    r = sw.distribute_tensor(whole, mesh, [sw.Replicate()])

    def every_call():
        with sw.spmd(mesh):
            for read in READS.values():
                x = _pending(mesh, whole)
                read(x), read(x), r + x, x.view(24).exp()

    def held():
        gc.collect()
        touched = [r, r._spec, r._spec.token, r._local_tensor, sw.DTensor, None, short.on_forms, ()]
        touched += [part for key in short.on_forms for part in (key, *key)]
        return [sys.getrefcount(value) for value in touched], len(gc.get_objects())

    for _ in range(5):
        every_call()
    seen = [held()]
    for _ in range(2):
        for _ in range(60):
            every_call()
        seen.append(held())
    counts = zip(*(references for references, _ in seen), strict=True)
    both = [sorted(map(abs, (second - first, third - second))) for first, second, third in counts]
    # What other tests have left goes in fits, not as often as is called.
    return [(less, more) for less, more in both if less > 50 and more < 2 * less], seen[2][1] - seen[1][1]


def test_no_reference_is_lost_or_kept(ranks):
    """On ranks of its own: what other tests have left on them goes while it counts."""
    for grown, objects in ranks(2, _what_stays, fresh=True):
        assert grown == []
        assert objects < 100


# ------------------------------------------------------------------------ finished operands as terms of a sum

SUMS = {
    "whole first": lambda p, r: r + p,
    "whole second": lambda p, r: torch.add(p, r, alpha=3),
    "taken away": lambda p, r: r - p,
    "in place": lambda p, r: p.clone().add_(r),
    "both": lambda p, r: torch.where(torch.ones_like(r) > 0, p, r),
}


def _sums(sizes, dtype):
    mesh = rank_mesh(sizes)
    whole = {"p": _whole(4, 6).to(dtype), "r": _whole(4, 6) + 1}
    share = whole["p"] / dist.get_world_size()
    p = 1 * sw.DTensor.from_local(share, mesh, [sw.Partial()] * len(sizes))
    r = sw.distribute_tensor(whole["r"].to(dtype), mesh, [sw.Replicate()] * len(sizes))
    found = {}
    for name, call in SUMS.items():
        for _ in range(3):
            call(p, r)
        with InPython() as python:
            out = call(p, r)
        assert all(placement == sw.Partial("sum") for placement in out.placements), name
        torch.testing.assert_close(out.full_tensor(), call(whole["p"], whole["r"].to(dtype)), msg=name)
        with sw.trace() as seen:
            call(p, r)
        found[name] = python.calls, [str(each) for each in seen.decisions]
    return found


@pytest.mark.parametrize(
    ("sizes", "dtype"), [((2,), torch.float32), ((2, 2), torch.float64), ((3,), torch.float64)]
)
def test_a_whole_operand_becomes_a_term_in_c(ranks, sizes, dtype):
    for found in ranks(torch.Size(sizes).numel(), _sums, sizes, dtype):
        for name, (calls, events) in found.items():
            assert calls == [], name
            assert any("redistribute" in each for each in events), (name, events)


def _otherwise_in_memory():
    """Operands that lie otherwise, of fewer dims or of another type: as one device has it."""
    mesh = rank_mesh((dist.get_world_size(),))
    whole = _whole(4, 6)
    p = 1 * sw.DTensor.from_local(whole / dist.get_world_size(), mesh, [sw.Partial()])
    for other in (_whole(6, 4).t(), _whole(6), _whole(4, 1), _whole(4, 6).double(), _whole(4, 6).bfloat16()):
        r = sw.distribute_tensor(other, mesh, [sw.Replicate()])
        for _ in range(4):
            out, expected = r + p, other + whole
            assert out.dtype == expected.dtype
            assert out.stride() == expected.stride() == out.to_local().stride()
            torch.testing.assert_close(out.full_tensor(), expected)


def test_terms_that_lie_otherwise_are_those_of_one_device(ranks):
    ranks(2, _otherwise_in_memory)


def _on_the_meta_device_after():
    """The same call on tensors without data: what stands for zero is of the device of the operand."""
    mesh = rank_mesh((dist.get_world_size(),))
    made = []
    for device in ("cpu", "meta", "cpu"):
        p = 1 * sw.DTensor.from_local(torch.ones(4, 6, device=device), mesh, [sw.Partial()])
        r = sw.DTensor.from_local(torch.ones(4, 6, device=device), mesh, [sw.Replicate()])
        made += [(r + p).device.type for _ in range(4)]
    return made


def test_terms_are_of_the_device_of_their_operand(ranks):
    for made in ranks(2, _on_the_meta_device_after):
        assert made == ["cpu"] * 4 + ["meta"] * 4 + ["cpu"] * 4


# ----------------------------------------------------------------------------------------- gradients of views


def _slices():
    """The gradient of a slice is put back in C where its base lies as the rules say, or is not known."""
    mesh = rank_mesh((dist.get_world_size(),))
    whole = _whole(4, 8)
    calls = []
    for placed in ([sw.Shard(0)], [sw.Replicate()]):
        for _ in range(4):
            x = sw.distribute_tensor(whole, mesh, placed).requires_grad_()
            plain = whole.clone().requires_grad_()
            for each in (x, plain):
                loss = (each[:, :4].exp() * each[:, 4:].sin()).sum()
                with InPython() as python:
                    loss.backward()
            torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
            x = sw.distribute_tensor(whole, mesh, placed).requires_grad_()
            loss = (x[:, :4].exp() * x[:, 4:].sin()).sum()
            with InPython() as python:
                loss.backward()
        calls += [call for call in python.calls if "slice" in call]
    return calls


def test_gradients_of_slices_are_put_back_in_c(ranks):
    assert ranks(2, _slices) == [[], []]


def _bases_that_lie_otherwise():
    """One call, made by a program and by a backward that knows how the base lies: that is asked each time."""
    mesh = rank_mesh((dist.get_world_size(),))
    whole = _whole(8, 6)
    x = sw.distribute_tensor(whole, mesh, [sw.Shard(0)])
    part = x[:4] * 1  # one rank has it
    put = torch.ops.aten.slice_backward
    for _ in range(3):
        put(part, [8, 6], 0, 0, 4, 1)
    with InPython() as python:
        made = put(part, [8, 6], 0, 0, 4, 1)
    torch.testing.assert_close(made.full_tensor(), put(whole[:4], [8, 6], 0, 0, 4, 1))
    given = sw.distribute_tensor(whole, mesh, [sw.Shard(0)]).requires_grad_()
    given[:4].backward(part)
    torch.testing.assert_close(given.grad.full_tensor(), made.full_tensor())
    return python.calls, made.placements != given.placements, given.grad.placements == given.placements


def test_the_base_of_a_slice_is_asked_each_time(ranks):
    (in_python, *found), (_, *found_there) = ranks(2, _bases_that_lie_otherwise)
    assert not in_python  # the other rank holds nothing, and calls no kernel
    assert found == found_there == [True, True]

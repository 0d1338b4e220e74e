"""A pending value is finished once for all that read it, and only as long as nobody writes it."""

import copy
import gc
import io
import weakref
from functools import partial

import torch

import shardwright as sw
from shardwright import testing
from shardwright.errors import ImplicitRedistributionError
from shardwright.tensor import finished_forms
from shardwright.testing.meshes import rank_mesh

from .cases import close, full


def _pending(mesh, *shape, grad=False):
    """Terms of `full(*shape)`, as an op made them, and that."""
    value = full(*shape)
    term = value / 4 if mesh.get_local_rank() else value * 3 / 4
    given = sw.DTensor.from_local(term, mesh, [sw.Partial("sum")])
    return (given * 1).detach().requires_grad_(grad), value.clone().requires_grad_(grad)


def _sent(call):
    with sw.trace() as seen:
        out = call()
    return len(seen.collectives), out


def _once():
    mesh = rank_mesh((2,))
    x, plain = _pending(mesh, 4, 6)
    counts = []
    for call in (torch.exp, torch.sin, lambda v: v * v, lambda v: torch.stack([v, v]).exp(), torch.softmax):
        number, out = _sent(lambda c=call: c(x, 1) if c is torch.softmax else c(x))
        counts.append(number)
        close(out, call(plain, 1) if call is torch.softmax else call(plain), str(call))
    assert counts == [1, 0, 0, 0, 0], counts
    assert x.placements == (sw.Partial("sum"),)
    for view in (
        lambda v: v.view(2, 12),
        lambda v: v.t(),
        lambda v: v[1:3],
        lambda v: v.unflatten(1, (2, 3)),
    ):
        number, out = _sent(lambda view=view: view(x).exp())
        assert number == 0
        close(out, view(plain).exp(), "view")


def _views_first():
    mesh = rank_mesh((2,))
    x, plain = _pending(mesh, 4, 6)
    flat, part = x.view(24), x[:2]
    number, out = _sent(flat.exp)
    close(out, plain.view(24).exp(), "view")
    assert number == 1
    for name, ours, wanted in (("base", x, plain), ("part", part, plain[:2]), ("flat", flat, plain.view(24))):
        number, out = _sent(ours.sin)
        assert number == 0, name
        close(out, wanted.sin(), name)


WRITES = {
    "in place": lambda x: x.add_(1),
    "copied": lambda x: x.copy_(x.sin()),
    "through a view": lambda x: x.view(24).mul_(2),
    "through an older view": None,
    "an element": lambda x: x.__setitem__((0, 1), 7.0),
    "a part": lambda x: x[1:3].zero_(),
    "filled": lambda x: x.fill_(2),
    "a list": lambda x: torch._foreach_add_([x], 1.0),
    "out": lambda x: torch.add(x, 1, out=x),
    "data": lambda x: x.data.mul_(3),
    "detached": lambda x: x.detach().mul_(3),
    "set data": lambda x: setattr(x, "data", (x * 2).detach()),
    "raw": lambda x: (x.to_local() if isinstance(x, sw.DTensor) else x).mul_(2),
    "swapped": None,
}


def _written():
    mesh = rank_mesh((2,))
    for name, write in WRITES.items():
        for of in (lambda v: v, lambda v: v.view(24), lambda v: v.t()):
            x, plain = _pending(mesh, 4, 6)
            older = x[1:], plain[1:]
            read = of(x), of(plain)
            for v in (x, read[0], plain):
                v.exp()
            if name == "through an older view":
                for v in older:
                    v.mul_(5)
            elif name == "swapped":
                other, plain_other = _pending(mesh, 4, 6)
                del read, older  # they hold it
                torch.utils.swap_tensors(x, (other * 2).detach())
                plain = plain_other * 2
                read = of(x), of(plain)
            else:
                write(x)
                write(plain)
            close(x.exp(), plain.exp(), name)
            if name != "set data":
                close(read[0].exp(), read[1].exp(), f"{name}, view")
            close(x.full_tensor(), plain, name)


def _results_are_their_own():
    """What is written into a result never reaches the form that is kept."""
    mesh = rank_mesh((2,))
    for call in (
        torch.clone, torch.positive, lambda v: v.to(torch.float32), lambda v: v.contiguous().clone(),
        lambda v: torch.ops.aten._unsafe_view(v, [24]), lambda v: v.reshape(24).clone(), lambda v: v + 0,
        lambda v: torch.nn.functional.dropout(v, training=False).clone(), lambda v: v.expand(2, 4, 6).sum(0),
        torch.conj_physical, lambda v: v.real.clone(), torch.relu, lambda v: v.repeat(1, 1),
    ):  # fmt: skip
        x, plain = _pending(mesh, 4, 6)
        before = x.exp()
        out = call(x)
        if out._local_tensor.untyped_storage()._cdata != x._local_tensor.untyped_storage()._cdata:
            out.zero_()
        close(x.exp(), plain.exp(), "kept")
        close(before, plain.exp(), "before")


def _differentiated():
    mesh = rank_mesh((2,))
    x, plain = _pending(mesh, 4, 6, grad=True)
    for v in (x, plain):
        h = v * 2
        y = (h.exp() + h.sin() * h).sum() + (h.view(24).tanh() * h.flatten()).sum()
        (first,) = torch.autograd.grad(y, v, create_graph=True)
        (first.square().sum() + y).backward()
    close(x.grad, plain.grad, "gradient")


def _copied_and_saved():
    mesh = rank_mesh((2,))
    x, plain = _pending(mesh, 4, 6)
    x.exp()
    for made in (copy.deepcopy(x), copy.copy(x), x.clone(), x.detach()):
        close(made.exp(), plain.exp(), "copied")
        made.mul_(1)
    file = io.BytesIO()
    torch.save(x, file)
    y, _ = _pending(mesh, 4, 6)
    other = io.BytesIO()
    torch.save(y, other)
    assert abs(len(file.getvalue()) - len(other.getvalue())) < 64, "the form was saved too"
    file.seek(0)
    close(torch.load(file, weights_only=False).exp(), plain.exp(), "loaded")


def _lives_as_long_as_the_value():
    mesh = rank_mesh((2,))
    x, _ = _pending(mesh, 4, 6)
    x.exp()
    form = weakref.ref(finished_forms.known(x)._local_tensor)
    assert form() is not None
    del x
    gc.collect()
    assert form() is None


def _explicit():
    mesh = rank_mesh((2,))
    x, plain = _pending(mesh, 4, 6)
    with sw.explicit():
        for _ in range(2):
            try:
                x.exp()
            except ImplicitRedistributionError:
                continue
            raise AssertionError("sent")
    x.exp()
    with sw.explicit():
        close(x.sin(), plain.sin(), "kept: nothing is sent")


def _inference():
    mesh = rank_mesh((2,))
    with torch.inference_mode():
        x, plain = _pending(mesh, 4, 6)
        close(x.exp(), plain.exp(), "first")
        x.mul_(2)
        close(x.exp(), (plain * 2).exp(), "written")


def _axes_and_cuts():
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    value = full(4, 6)
    for first in (sw.Shard(0), sw.Shard(1), sw.Partial("sum"), sw.Replicate(), sw.Interleaved(0, 2)):
        cut = sw.distribute_tensor(
            value, mesh, [first if not first.is_pending else sw.Replicate(), sw.Replicate()]
        )
        a = cut.redistribute(placements=[first, sw.Partial("sum")]) * 1
        for number, call in enumerate(
            (torch.exp, torch.sin, lambda v: v.t().exp(), lambda v: v.view(2, 2, 6).tanh())
        ):
            sent, out = _sent(lambda c=call, x=a: c(x))
            close(out, call(value), f"{first}")
            assert number == 0 or sent == 0, (first, number, sent)


def _clipped_and_stepped():
    """Gradients that are read by a norm, scaled and stepped with: sent once, in a list together."""
    mesh = rank_mesh((2,))
    for foreach in (False, True):
        plain = [full(4, 6, seed=i).requires_grad_() for i in range(3)]
        ours = [
            sw.distribute_tensor(p.detach().clone(), mesh, [sw.Replicate()]).requires_grad_() for p in plain
        ]
        for p, q in zip(ours, plain, strict=True):
            p.grad, q.grad = _pending(mesh, 4, 6)
        sent, norm = _sent(lambda p=ours, f=foreach: torch.nn.utils.clip_grad_norm_(p, 0.5, foreach=f))
        close(norm, torch.nn.utils.clip_grad_norm_(plain, 0.5), "norm")
        assert sent == (1 if foreach else 3), (foreach, sent)
        for p, q in zip(ours, plain, strict=True):
            close(p.grad, q.grad, "clipped")
        optimizers = [torch.optim.AdamW(params, lr=0.1) for params in (ours, plain)]
        for _ in range(2):
            sent = [_sent(optimizer.step)[0] for optimizer in optimizers]
            assert sent == [0, 0], sent
            for p, q in zip(ours, plain, strict=True):
                close(p.grad, q.grad, "after the step")
                close(p, q.detach(), "stepped")


SCALES = (
    lambda v, _: v.mul_(2.0), lambda v, _: v.div_(4), torch.Tensor.mul_, torch.Tensor.div_,
    lambda v, _: torch._foreach_mul_([v], 2.0), lambda v, n: torch._foreach_mul_([v], n),
    lambda v, _: torch._foreach_mul_([v], [2.0]), lambda v, _: torch._foreach_div_([v], 4.0),
)  # fmt: skip


def _scaled():
    mesh = rank_mesh((2,))
    three = torch.tensor(3.0)
    number = sw.distribute_tensor(three, mesh, [sw.Replicate()])
    for place, scale in enumerate(SCALES):
        x, plain = _pending(mesh, 4, 6)
        view, plain_view = x.view(24), plain.view(24)
        x.exp()
        for _ in range(2):
            scale(x, number)
            scale(plain, three)
            sent, out = _sent(x.exp)
            close(out, plain.exp(), f"{place} scaled")
            close(view.exp(), plain_view.exp(), f"{place} a view")
            assert sent == (1 if place == LIST_OF_NUMBERS else 0), (place, sent)
        close(x.full_tensor(), plain, "the value")
        for v in (x, plain):
            v.add_(1)
        close(x.exp(), plain.exp(), "written otherwise")
        close(view.exp(), plain_view.exp(), "written otherwise, a view")


LIST_OF_NUMBERS = 6
WRITE_OUT = (
    lambda v: v.expand(4, 6) / 3, lambda v: v.expand(4, 6) * 2.0, lambda v: -v.expand(4, 6),
    lambda v: torch.div(v.expand(4, 6), torch.tensor(3.0)),
)  # fmt: skip


def _written_out():
    """Terms of full size, finished by the numbers that they were expanded from, as long as these hold."""
    mesh = rank_mesh((2,))
    other = full(4, 6)
    cut = sw.distribute_tensor(other, mesh, [sw.Shard(1)])
    for number, call in enumerate(WRITE_OUT):
        for write in (None, lambda v: v.add_(1), lambda v: v.view(-1).mul_(2), lambda v: v.data.zero_()):
            x, plain = _pending(mesh, 4, 1)
            terms, wanted = call(x), call(plain)
            assert terms.placements == (sw.Partial("sum"),)
            if write is not None:
                for v in (x, plain):
                    write(v)
            with sw.trace() as seen:
                out = terms * cut
            close(out, wanted * other, f"{number} cut")
            assert write is not None or seen.bytes == 4 * 4, seen.bytes
            close(terms.exp(), wanted.exp(), f"{number} whole")
            for v in (terms, wanted):
                v.add_(1)
            close(terms * cut, wanted * other, f"{number} written")
            close(call(x).full_tensor(), call(plain), f"{number} again")


def _in_any_order():
    """What a call sends does not depend on whether a backward made it first."""
    mesh = rank_mesh((2,))
    found = []
    for backward_first in (False, True):
        testing.forget()
        x, plain = _pending(mesh, 4, 1, grad=True)
        calls = [lambda v: v.detach().expand(4, 6) / 3, lambda v: torch.autograd.grad(_through(v), v)[0]]
        sent = {}
        for number in (1, 0) if backward_first else (0, 1):
            call = calls[number]
            sent[number], out = _sent(partial(call, x))
            close(out, call(plain), "value")
        found.append(sent)
    assert found[0] == found[1]


def _through(v):
    """A function whose derivative divides an expanded tensor by 3, as `_in_any_order` does outside."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return (x.expand(4, 6) / 3).sum(1, keepdim=True) * grad

    return Function.apply(v).sum()


def test_terms_that_were_written_out(ranks):
    ranks(2, _written_out)


def test_a_backward_decides_as_a_forward(ranks):
    ranks(2, _in_any_order)


def test_gradients_are_sent_once_for_norm_and_step(ranks):
    ranks(2, _clipped_and_stepped)


def test_a_form_is_scaled_with_its_value(ranks):
    ranks(2, _scaled)


def test_a_pending_value_is_finished_once(ranks):
    ranks(2, _once)


def test_views_and_what_they_view_are_finished_together(ranks):
    ranks(2, _views_first)


def test_a_form_holds_until_the_value_is_written(ranks):
    ranks(2, _written, timeout=60)


def test_results_are_no_part_of_the_form(ranks):
    ranks(2, _results_are_their_own)


def test_derivatives_of_what_is_read_often(ranks):
    ranks(2, _differentiated)


def test_copies_and_files_hold_the_value_alone(ranks):
    ranks(2, _copied_and_saved)


def test_a_form_goes_with_its_value(ranks):
    ranks(2, _lives_as_long_as_the_value)


def test_explicit_refuses_what_sends_and_nothing_else(ranks):
    ranks(2, _explicit)


def test_nothing_is_kept_without_version_counters(ranks):
    ranks(2, _inference)


def test_forms_on_two_axes(ranks):
    ranks(4, _axes_and_cuts)

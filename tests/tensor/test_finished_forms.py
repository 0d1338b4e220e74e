"""Inside `spmd` a pending value is finished once for all that read it, as long as nobody writes it."""

import copy
import gc
import io
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist

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


def _in_spmd(body, sizes=(2,)):
    with sw.spmd(rank_mesh(sizes)):
        body()


def _in_backward(body):
    """Run it while an autograd engine is at work."""

    class Run(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x * 1

        @staticmethod
        def backward(_, grad):
            body()
            return grad

    Run.apply(torch.zeros(1, requires_grad=True)).sum().backward()


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
    "raw memory": lambda x: _local(x).untyped_storage().copy_((_local(x) * 2).clone().untyped_storage()),
    "raw data": lambda x: _local(x).data.mul_(2),
    "raw numpy": lambda x: _local(x).numpy().__imul__(2),
    "raw, detached": lambda x: _local(x.detach()).mul_(2),
    "collective": lambda x: _doubled(_local(x)),
}


def _local(x):
    return x.to_local() if isinstance(x, sw.DTensor) else x


def _doubled(x):
    """By what no version counter sees."""
    if dist.is_initialized():
        dist.all_reduce(x.view(-1)[:0])  # nothing: only that it may be asked
    x.untyped_storage().copy_((x * 2).clone().untyped_storage())


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


SHAPES = (
    lambda v: v.t_(), lambda v: v.transpose_(0, 1), lambda v: v.swapaxes_(0, 1), lambda v: v.unsqueeze_(0),
    lambda v: v.unsqueeze_(1).squeeze_(1),
)  # fmt: skip


def _reshaped_in_place():
    """Views that were taken before see what they saw."""
    mesh = rank_mesh((2,))
    for number, change in enumerate(SHAPES):
        for rows in (4, 6):
            x, plain = _pending(mesh, rows, 4)
            older = [(x[1:3], plain[1:3]), (x.view(-1), plain.view(-1))]
            for v in (x, plain):
                change(v)
            close(x.exp(), plain.exp(), f"{number} base")
            for ours, wanted in older:
                close(ours.exp(), wanted.exp(), f"{number} view")
                close(ours.sin(), wanted.sin(), f"{number} view again")


def _outside():
    """Where ranks may do as they like, each reader finishes the value for itself."""
    mesh = rank_mesh((2,))
    x, plain = _pending(mesh, 4, 6)
    for _ in range(2):
        number, out = _sent(x.exp)
        assert number == 1
        close(out, plain.exp(), "outside")
    with sw.spmd(mesh):
        x.exp()
    if mesh.get_local_rank() == 0:
        x.to_local().add_(1)
    close(x.exp(), (plain + 1).exp(), "written by one rank")
    assert (x * 2).placements == (sw.Partial("sum"),)


def _empty_parts():
    """Ranks that hold nothing count no writes: nothing is kept where there are some."""
    mesh = rank_mesh((2, 2), ("a", "b"))
    value = full(1, 6)
    x = sw.distribute_tensor(value.clone(), mesh, [sw.Replicate(), sw.Shard(0)])
    x = x.redistribute(placements=[sw.Partial("sum"), sw.Shard(0)]) * 1
    x.sin()
    x.data[0:1].zero_()
    close(x.cumsum(0), value * 0, "after a write")


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


def _replicated(mesh, count):
    plain = [full(4, 6, seed=i).requires_grad_() for i in range(count)]
    ours = [sw.distribute_tensor(p.detach().clone(), mesh, [sw.Replicate()]).requires_grad_() for p in plain]
    return ours, plain


def _clipped_and_stepped(together=True):
    """Gradients that are read by a norm, scaled and stepped with: each time in a list together."""
    mesh = rank_mesh((2,))
    for foreach in (False, True):
        ours, plain = _replicated(mesh, 3)
        for p, q in zip(ours, plain, strict=True):
            p.grad, q.grad = _pending(mesh, 4, 6)
        sent, norm = _sent(lambda p=ours, f=foreach: torch.nn.utils.clip_grad_norm_(p, 0.5, foreach=f))
        close(norm, torch.nn.utils.clip_grad_norm_(plain, 0.5), "norm")
        assert sent == (1 if foreach and together else 3), (foreach, sent)
        for p, q in zip(ours, plain, strict=True):
            close(p.grad, q.grad, "clipped")
        optimizers = [torch.optim.AdamW(params, lr=0.1) for params in (ours, plain)]
        for _ in range(2):
            sent = [_sent(optimizer.step)[0] for optimizer in optimizers]
            assert sent == [1, 0], sent
            for p, q in zip(ours, plain, strict=True):
                close(p.grad, q.grad, "after the step")
                close(p, q.detach(), "stepped")


def _held_gradients(**options):
    """A step leaves gradients the objects that they were: who holds them, or views of them, goes on."""
    mesh = rank_mesh((2,))
    ours, plain = _replicated(mesh, 2)
    buffers = _pending(mesh, 2, 24)
    held = []
    for params, flat in zip((ours, plain), buffers, strict=True):
        for i, p in enumerate(params):
            p.grad = flat[i].view(4, 6)
        held.append([p.grad for p in params])
    optimizers = [torch.optim.AdamW(params, lr=0.1, **options) for params in (ours, plain)]
    for number in range(3):
        for optimizer in optimizers:
            optimizer.step()
        for grads, flat in zip(held, buffers, strict=True):
            flat.mul_(2) if number == 0 else torch._foreach_zero_(grads)
        for p, q, grad in zip(ours, plain, held[0], strict=True):
            assert p.grad is grad
            close(p.grad, q.grad, f"{number} gradient")
            close(p, q.detach(), f"{number} stepped")
    ours, plain = _replicated(mesh, 2)
    for params, shared in zip((ours, plain), _pending(mesh, 4, 6), strict=True):
        for p in params:
            p.grad = shared
        torch.optim.SGD(params, lr=0.1).step()
        assert params[0].grad is params[1].grad
    close(ours[0], plain[0].detach(), "one gradient for two")


def _closures(**options):
    """What a closure leaves in gradients stays there."""
    mesh = rank_mesh((2,))
    ours, plain = _replicated(mesh, 1)
    given = _pending(mesh, 4, 6)
    for (p,), g in zip((ours, plain), given, strict=True):
        optimizer = torch.optim.SGD([p], lr=0.1, **options)
        p.grad = g.clone()

        def closure(p=p, optimizer=optimizer):
            optimizer.zero_grad(set_to_none=False)
            loss = (p * p).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    close(ours[0], plain[0].detach(), "stepped")
    close(ours[0].grad, plain[0].grad, "what the closure made")


def _differentiated_step():
    """A step whose gradient is itself differentiated keeps its graph."""
    mesh = rank_mesh((2,))
    outer = [full(4, 6, seed=9).requires_grad_()]
    outer.append(sw.distribute_tensor(outer[0].detach().clone(), mesh, [sw.Replicate()]).requires_grad_())
    found = []
    for v in outer:
        p = torch.zeros_like(v).requires_grad_().clone()
        p.retain_grad()
        term = sw.DTensor.from_local(torch.ones(4, 6) / 2, mesh, [sw.Partial("sum")])
        term = term if isinstance(v, sw.DTensor) else torch.ones(4, 6)
        work = p.clone()
        p.grad = v * term
        torch.optim.SGD([p], lr=0.1, differentiable=True).step()
        (p * p + work).sum().backward()
        found.append(v.grad)
    close(found[1], found[0], "gradient of the gradient")


SCALES = (
    lambda v, _: v.mul_(2.0), lambda v, _: v.div_(4), torch.Tensor.mul_, torch.Tensor.div_,
    lambda v, _: torch._foreach_mul_([v], 2.0), lambda v, n: torch._foreach_mul_([v], n),
    lambda v, _: torch._foreach_mul_([v], [2.0]), lambda v, _: torch._foreach_div_([v], 4.0),
    lambda v, _: torch._foreach_mul_([v, v[1:3]], 2.0),
    lambda v, _: torch._foreach_mul_([v, v.detach()], 2.0),
    lambda v, _: torch._foreach_mul_([v, _other(v)], 2.0),
)  # fmt: skip


def _other(v):
    """Beside which a list goes element by element."""
    if not isinstance(v, sw.DTensor):
        return torch.ones(2)
    return sw.DTensor.from_local(torch.ones(2), v.device_mesh, [sw.Partial("product")])


def _scaled():
    mesh = rank_mesh((2,))
    three = torch.tensor(3.0)
    number = sw.distribute_tensor(three, mesh, [sw.Replicate()])
    for place, scale in enumerate(SCALES):
        x, plain = _pending(mesh, 4, 6)
        view, plain_view = x.view(24), plain.view(24)
        x.exp()
        x[1:3].exp()
        for _ in range(2):
            scale(x, number)
            scale(plain, three)
            close(x.exp(), plain.exp(), f"{place} scaled")
            close(view.exp(), plain_view.exp(), f"{place} a view")
            close(x.detach().exp(), plain.exp(), f"{place} detached")
        close(x.full_tensor(), plain, "the value")


WRITE_OUT = (
    lambda v: v.expand(4, 6) / 3, lambda v: v.expand(4, 6) * 2.0, lambda v: -v.expand(4, 6),
    lambda v: torch.div(v.expand(4, 6), torch.tensor(3.0)),
)  # fmt: skip


def _number_written():
    """What the terms were divided by is written: they are not."""
    mesh = rank_mesh((2,))
    x, plain = _pending(mesh, 4, 1)
    other = full(4, 6)
    cut = sw.distribute_tensor(other, mesh, [sw.Shard(1)])
    for scale in (torch.tensor(3.0), sw.distribute_tensor(torch.tensor(3.0), mesh, [sw.Replicate()])):
        terms = x.expand(4, 6) / scale
        scale.mul_(2)
        close(terms * cut, plain.expand(4, 6) / 3 * other, "the number was written")
        file = io.BytesIO()
        torch.save(terms, file)
        copy.deepcopy(terms)


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
    ranks(2, _in_backward, _written_out)
    ranks(2, _in_backward, _number_written)


def test_a_backward_decides_as_a_forward(ranks):
    ranks(2, _in_spmd, _in_any_order)


def test_gradients_are_sent_together_for_norm_and_step(ranks):
    ranks(2, _in_spmd, _clipped_and_stepped)
    ranks(2, _clipped_and_stepped, together=False)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": False}], ids=str)
def test_a_step_leaves_gradients_the_objects_that_they_were(ranks, options):
    ranks(2, _held_gradients, **options)
    ranks(2, _in_spmd, partial(_held_gradients, **options))


def test_what_a_closure_leaves_in_gradients_stays(ranks):
    ranks(2, _closures)
    ranks(2, _closures, fused=True)


def test_a_differentiable_step(ranks):
    ranks(2, _differentiated_step)
    ranks(2, _in_spmd, _differentiated_step)


def test_views_of_what_was_reshaped_in_place(ranks):
    ranks(2, _in_spmd, _reshaped_in_place)


def test_nothing_is_kept_outside_of_spmd(ranks):
    ranks(2, _outside)


def test_nothing_is_kept_where_ranks_hold_nothing(ranks):
    ranks(4, _in_spmd, _empty_parts, (2, 2))


def test_scaling_is_a_write(ranks):
    ranks(2, _in_spmd, _scaled)


def test_a_pending_value_is_finished_once(ranks):
    ranks(2, _in_spmd, _once)


def test_views_and_what_they_view_are_finished_together(ranks):
    ranks(2, _in_spmd, _views_first)


def test_a_form_holds_until_the_value_is_written(ranks):
    ranks(2, _in_spmd, _written, timeout=60)


def test_results_are_no_part_of_the_form(ranks):
    ranks(2, _in_spmd, _results_are_their_own)


def test_derivatives_of_what_is_read_often(ranks):
    ranks(2, _in_spmd, _differentiated)


def test_copies_and_files_hold_the_value_alone(ranks):
    ranks(2, _in_spmd, _copied_and_saved)


def test_a_form_goes_with_its_value(ranks):
    ranks(2, _in_spmd, _lives_as_long_as_the_value)


def test_explicit_refuses_what_sends_and_nothing_else(ranks):
    ranks(2, _in_spmd, _explicit)


def test_nothing_is_kept_without_version_counters(ranks):
    ranks(2, _in_spmd, _inference)


def test_forms_on_two_axes(ranks):
    ranks(4, _in_spmd, _axes_and_cuts, (2, 2))

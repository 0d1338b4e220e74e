"""Writing in place: into the tensor's own placement, through views into their base, and into cut dims."""

import pytest
import torch

import shardwright as sw
from shardwright.tensor.wrap import held_outside
from shardwright.testing.meshes import rank_mesh
from tests.placement.user_placements import LogSumExp
from tests.tiers import only

from .cases import close, full, layouts_of, mesh, place

SCALARS = {
    "add_": lambda x, y: x.add_(y),
    "add_ with alpha": lambda x, y: x.add_(y, alpha=-2),
    "sub_": lambda x, y: x.sub_(y),
    "mul_": lambda x, y: x.mul_(y),
    "div_": lambda x, y: x.div_(y),
    "copy_": lambda x, y: x.copy_(y),
    "iadd": lambda x, y: x.__iadd__(y),
    "add_ a scalar": lambda x, _: x.add_(1.5),
    "mul_ by a scalar": lambda x, _: x.mul_(-2),
    "pow_": lambda x, _: x.pow_(2),
    "exp_": lambda x, _: x.exp_(),
    "relu_": lambda x, _: x.relu_(),
    "clamp_": lambda x, _: x.clamp_(-0.5, 0.5),
    "zero_": lambda x, _: x.zero_(),
    "fill_": lambda x, _: x.fill_(3.0),
    "addcmul_": lambda x, y: x.addcmul_(y, y, value=0.5),
    "lerp_": lambda x, y: x.lerp_(y, 0.25),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 1, 9.0),
    "tril_": lambda x, _: x.tril_(),
    "cumsum_": lambda x, _: x.cumsum_(0),
    "t_ of a sum": lambda x, y: x.add_(y.sum(0)),
}


def _in_place(name):
    function = SCALARS[name]
    x, y = full(5, 7), full(5, 7, seed=1).abs() + 0.5
    wanted = x.clone()
    function(wanted, y)
    for left in layouts_of(2):
        for right in layouts_of(2):
            d, e = place(x, left), place(y, right)
            before = sw.layout_of(d)
            local = d._local_tensor
            function(d, e)
            assert sw.layout_of(d) == before, f"{left} {right}"
            assert d._local_tensor is local, "the storage that others may share is written"
            close(d, wanted, f"{left} {right}")
            close(e, y, "the other operand")


@pytest.mark.parametrize("name", SCALARS)
def test_an_in_place_op_keeps_the_placement_and_writes_the_value(ranks, name):
    ranks(2, _in_place, name)


WRITES = {
    "row": lambda x: x[2].fill_(5.0),
    "column": lambda x: x[:, 3].mul_(2),
    "slice": lambda x: x[1:4].add_(1),
    "slice of columns": lambda x: x[:, 2:5].zero_(),
    "step": lambda x: x[::2].neg_(),
    "transposed": lambda x: x.t()[1].fill_(7.0),
    "view": lambda x: x.view(-1)[:9].zero_(),
    "unsqueezed": lambda x: x.unsqueeze(0)[0, 1].fill_(2.0),
    "setitem": lambda x: x.__setitem__(1, 4.0),
    "setitem of a slice": lambda x: x.__setitem__((slice(None), slice(1, 3)), -1.0),
    "setitem of an element": lambda x: x.__setitem__((3, 4), 11.0),
    "narrowed": lambda x: x.narrow(1, 2, 3).exp_(),
    "diagonal": lambda x: x.diagonal().fill_(0.0),
    "split": lambda x: x.split(2)[1].mul_(3),
    "unbind": lambda x: x.unbind(1)[6].fill_(1.0),
    "heads": lambda x: x.view(6, 2, 4).transpose(0, 1)[1].add_(2),
    "chunk of columns": lambda x: x.chunk(2, 1)[1].sigmoid_(),
}


SEVERAL = {"split", "unbind", "chunk of columns"}  # torch refuses to differentiate these writes


def _through_views(name):
    """The write reaches the base, under autograd's eyes or not."""
    write = WRITES[name]
    x = full(6, 8)
    wanted = x.clone()
    write(wanted)
    for layout in layouts_of(2):
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                d = place(x, layout)
                before = sw.layout_of(d)
                write(d)
                close(d, wanted, f"{layout} {mode.__name__}")
                assert sw.layout_of(d) == before


@pytest.mark.parametrize("world", only([2], [2, 3, 4]))
@pytest.mark.parametrize("name", WRITES)
def test_a_write_through_a_view_reaches_the_base(ranks, name, world):
    ranks(world, _through_views, name)


def _what_a_local_graph_saved():
    """A write counts for the local tensor too: its own graph must not compute with what is there then."""
    held_outside.clear()  # as in a program that comes to this first
    writes = (
        lambda y: y.mul_(2),
        lambda y: y[:1].mul_(2),
        lambda y: y.uniform_(),
        lambda y: y[1:].zero_(),
        lambda y: torch._foreach_mul_([y], 2),
        lambda y: torch._foreach_mul_([y[1:]], 2),
    )
    for write in (*writes, *writes, *writes):  # first calls, and known ones
        for mode in (torch.enable_grad, torch.no_grad):
            _, y = _with_a_local_graph()
            with mode():
                write(y.detach().clone())  # of which no graph knows: what is learned of it holds for others
                write(y)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


def _with_a_local_graph():
    x = torch.randn(3, requires_grad=True)
    return x, sw.DTensor.from_local(x.exp(), rank_mesh((1,), ("a",)), [sw.Shard(0)])


def _what_was_taken_before():
    """The same of what `to_local` gave."""
    held_outside.clear()
    for write in (lambda x: x.mul_(2), lambda x: torch._foreach_mul_([x], 2)) * 3:
        x = sw.distribute_tensor(torch.randn(3), rank_mesh((1,), ("a",)), [sw.Shard(0)]).requires_grad_()
        squares = x.to_local().square()
        with torch.no_grad():
            write(x)
        with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
            squares.sum().backward()


def _data_counts_no_write():
    """As on one device: what was saved is computed with as it is then, without a word."""
    for write in (lambda y: y.mul_(2), lambda y: y[:].mul_(2), lambda y: torch._foreach_mul_([y], 2)) * 3:
        x, y = _with_a_local_graph()
        write(y.data)
        y.sum().backward()
        torch.testing.assert_close(x.grad, 2 * x.detach().exp())


@pytest.mark.parametrize(
    "program", [_what_a_local_graph_saved, _what_was_taken_before, _data_counts_no_write]
)
def test_a_write_is_seen_by_the_graph_that_made_the_local_tensor(ranks, program):
    ranks(1, program)


def _shape_changes():
    for change in (lambda x: x.t_(), lambda x: x.transpose_(0, 1), lambda x: x.unsqueeze_(0)):
        for layout in layouts_of(2):
            d, x = place(full(5, 7), layout), full(5, 7)
            assert change(d) is d
            change(x)
            assert d.shape == x.shape
            close(d, x)


def test_an_op_that_changes_a_shape_in_place_changes_the_layout_too(ranks):
    ranks(2, _shape_changes)


def _indexed():
    x = full(5, 7)
    rows, columns = torch.tensor([4, 0, 2]), torch.tensor([6, 1, 1])
    values = torch.tensor([10.0, 20.0, 30.0])
    source = full(3, 7, seed=2)
    calls = [
        lambda a, i, j, v, s: a.index_put_((i, j), v),
        lambda a, i, j, v, s: a.index_put_((i, j), v, accumulate=True),
        lambda a, i, j, v, s: a.index_add_(0, i, s),
        lambda a, i, j, v, s: a.index_copy_(0, i, s),
        lambda a, i, j, v, s: a.index_fill_(1, i, 3.0),
        lambda a, i, j, v, s: a.scatter_(0, i.unsqueeze(1).expand(3, 7), s),
        lambda a, i, j, v, s: a.scatter_add_(0, i.unsqueeze(1).expand(3, 7), s),
        lambda a, i, j, v, s: a.__setitem__(i, s),
        lambda a, i, j, v, s: a.__setitem__((i, j), v),
        lambda a, i, j, v, s: a.copy_(a.index_select(0, i).sum(0)),
        lambda a, i, j, v, s: a.copy_(a.gather(1, j.expand(5, 3)).sum(1, keepdim=True)),
        lambda a, i, j, v, s: a.copy_(a[i][:, j].sum()),
        lambda a, i, j, v, s: a.masked_scatter_(a > 0, a.abs() * 2),
    ]
    for number, call in enumerate(calls):
        wanted = x.clone()
        call(wanted, rows, columns, values, source)
        for layout in layouts_of(2, pending=False):
            d = place(x, layout)
            grid = d.device_mesh
            others = [sw.distribute_tensor(t, grid) for t in (rows, columns, values, source)]
            call(d, *others)
            close(d, wanted, f"call {number}, {layout}")
            assert d.placements == layout


@pytest.mark.parametrize("world", only([3], [2, 3]))
def test_indexed_writes_into_a_cut_dim(ranks, world):
    ranks(world, _indexed)


def _out():
    x, y = full(5, 7), full(5, 7, seed=1)
    for layout in layouts_of(2):
        out = sw.zeros(5, 7, device_mesh=mesh(), placements=layout)
        result = torch.add(place(x, layout), place(y, layout), out=out)
        assert result is out
        close(out, x + y, f"out= {layout}")
        assert out.placements == layout
    plain = torch.zeros(5, 7)
    with sw.trace() as t:
        torch.add(place(x, [sw.Shard(0)]), place(y, [sw.Shard(1)]), out=plain)
    close(plain, x + y)
    assert any("plain" in d.reason or "plain" in str(d) for d in t.decisions)
    plain[:] = place(x, [sw.Shard(1)])
    close(plain, x)
    plain.copy_(place(y, [sw.Partial("sum")]))
    close(plain, y)


def test_out_and_writes_into_plain_tensors_take_the_full_value(ranks):
    ranks(2, _out)


def _aliases():
    """A view shares storage wherever torch's would: a later write into the base is seen, too."""
    x = full(6, 8)
    for layout in layouts_of(2, pending=False):
        for view in (lambda a: a[2:5], lambda a: a.t(), lambda a: a.view(3, 2, 8), lambda a: a[:, 1]):
            d, plain = place(x, layout), x.clone()
            seen, wanted = view(d), view(plain)
            d.mul_(10)
            plain.mul_(10)
            close(seen * 1, wanted, f"{layout}")
            assert seen._version == d._version, "autograd sees the write"
            seen.sub_(1)
            wanted.sub_(1)
            close(d, plain, f"{layout}, back")
            other = view(d)
            d[2:4].zero_()
            plain[2:4].zero_()
            close(other + 0, view(plain), f"{layout}, another view")


def test_a_write_into_the_base_is_seen_through_a_view(ranks):
    ranks(2, _aliases)


def _detached():
    """A view that wants a gradient, after a write into its base; also of a reduction of the user's."""
    x = full(3, 2)
    for placement in (LogSumExp(None), sw.Partial("sum"), sw.Shard(0)):
        d = sw.distribute_tensor(x, mesh(), [placement]).requires_grad_()
        seen = d[1:]
        with torch.no_grad():
            d.add_(1)
        close(seen.detach(), x[1:] + 1, placement)


def test_a_view_is_detached_after_a_write_into_its_base(ranks):
    ranks(2, _detached)


def _gradients_through_views(name):
    """A write through a view has the gradient that it has on one device."""
    write = WRITES[name]
    x, weight = full(6, 8), full(6, 8, seed=3)
    plain = x.clone().requires_grad_()
    wanted = plain * 2
    write(wanted)
    (wanted * weight).sum().backward()
    for layout in layouts_of(2, pending=False):
        d = place(x, layout, requires_grad=True)
        y = d * 2
        write(y)
        close(y, wanted.detach(), f"{layout}")
        (y * place(weight, layout)).sum().backward()
        close(d.grad, plain.grad, f"gradient, {layout}")


@pytest.mark.parametrize("name", [n for n in WRITES if n not in SEVERAL])
def test_gradients_of_writes_through_views(ranks, name):
    ranks(2, _gradients_through_views, name)


def _views_of_views():
    x = full(6, 8)
    for layout in layouts_of(2, pending=False):
        d, plain = place(x, layout), x.clone()
        first, wanted = d[1:5], plain[1:5]
        second, wanted_second = first.t()[2:6], wanted.t()[2:6]
        second.fill_(4.0)
        wanted_second.fill_(4.0)
        close(d, plain, f"{layout}")
        first.add_(1)
        wanted.add_(1)
        close(second * 1, wanted_second, f"{layout}")
        d.mul_(2)
        plain.mul_(2)
        close(second.sum(), wanted_second.sum(), f"{layout}")


@pytest.mark.parametrize("world", only([2], [2, 4]))
def test_views_of_views(ranks, world):
    ranks(world, _views_of_views)


def _autograd_guards():
    d = sw.distribute_tensor(full(4, 4), rank_mesh((2,), ("tp",)), [sw.Shard(0)]).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf"):
        d.add_(1)
    y = d * 1.0
    z = y.exp()
    y.add_(z)
    y.sum().backward()
    close(d.grad, 1 + full(4, 4).exp())
    y = d.exp()
    z = y * y
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        z.sum().backward()


def test_autograds_own_checks_of_in_place_writes_hold(ranks):
    ranks(2, _autograd_guards)

"""`squeeze_`, `t_`, `unsqueeze_` change a DTensor as they change a plain tensor; what uses them works."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch

import shardwright as sw
from shardwright.errors import RuleError
from shardwright.testing import rank_mesh


def _in_place() -> None:
    mesh = rank_mesh((2,), ("dp",))
    x = torch.randn(3, 1, 4)
    d = sw.distribute_tensor(x, mesh, [sw.Shard(0)], src_data_rank=None)
    same = d.squeeze_(1).t_().unsqueeze_(0)
    wanted = x.squeeze(1).t()[None]
    assert same is d
    assert (d.shape, d.stride()) == (wanted.shape, wanted.stride())
    assert d.placements == (sw.Shard(2),)
    assert torch.equal(d.full_tensor(), wanted)
    assert d.resize_(3).shape == (3,)


def test_shapes_change_in_place(ranks):
    ranks(2, _in_place)


def _views_with_graphs() -> None:
    """Without gradients, of a view whose gradient would be that of the shape before: refused."""
    mesh = rank_mesh((2,), ("dp",))
    whole = torch.arange(6.0).view(3, 2)
    for placement in (sw.Shard(0), sw.Replicate()):
        x = sw.distribute_tensor(whole, mesh, [placement]).requires_grad_()
        view = (x * 2).view(3, 2)
        for op in (torch.Tensor.t_, lambda v: v.transpose_(0, 1), lambda v: v.unsqueeze_(0)):
            with torch.no_grad(), pytest.raises(RuleError, match="that has a graph"):
                op(view)
        view.square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), 8 * whole)
        turned = (x * 2).view(3, 2).t_()  # followed
        x.grad = None
        turned.square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), 8 * whole)
        with torch.no_grad():  # nobody's graph
            assert (x * 2).view(3, 2).t_().shape == (2, 3)
            assert x[:1].unsqueeze_(0).shape == (1, 1, 2)


def test_a_view_that_has_a_graph_keeps_its_shape_where_nothing_follows(ranks) -> None:
    ranks(2, _views_with_graphs)


def _bases_of_views() -> None:
    """Turned while a view of it is alive, a base would give that view the gradient of other elements."""
    mesh = rank_mesh((2,), ("dp",))
    x = sw.distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [sw.Shard(0)], src_data_rank=None)
    x.requires_grad_()
    for op in (torch.Tensor.t_, lambda v: v.swapaxes_(0, 1), lambda v: v.unsqueeze_(0)):
        base = x * 2
        view = base[1:]
        with pytest.raises(RuleError, match="views are alive"):
            op(base)
        base.squeeze_()  # changes nothing
        weights = sw.distribute_tensor(torch.arange(12.0).view(3, 4), mesh, [sw.Replicate()])
        (view * weights).sum().backward(retain_graph=True)
        wanted = torch.cat([torch.zeros(1, 4), 2 * torch.arange(12.0).view(3, 4)])
        assert torch.equal(x.grad.full_tensor(), wanted)
        x.grad = None
        del view
        op(base).sum().backward()  # nobody sees it any more
        assert torch.equal(x.grad.full_tensor(), torch.full((4, 4), 2.0))
        x.grad = None
    for function in (torch.sin, lambda v: v @ v, lambda v: v.mul_(3).add_(1)):
        function(x * 2).t_()[0].sum().backward()


def test_a_base_keeps_its_shape_while_views_with_gradients_are_alive(ranks) -> None:
    ranks(2, _bases_of_views)


_VIEWS = (lambda a: a[1:3], lambda a: a[1], lambda a: a.view(-1), lambda a: a[1:3, 1:3])


def _graphs_of_what_was_turned() -> None:
    """None of it wants a gradient when it is turned: what is written then must not get another's."""
    mesh = rank_mesh((2,), ("dp",))
    w = sw.distribute_tensor(torch.tensor(2.0), mesh).requires_grad_()
    for placement, view in itertools.product((sw.Shard(0), sw.Interleaved(1, 2)), _VIEWS):
        for turned, written in itertools.product((0, 1), (0, 1)):
            full = torch.arange(16.0).view(4, 4)
            x = sw.distribute_tensor(full, mesh, [placement], src_data_rank=None)
            ours, plain = (x, view(x)), (full, view(full))
            for tensors in (ours, plain):
                tensors[turned].unsqueeze_(0)
                tensors[written].add_(1)
            for give in (lambda x: x.mul_(w), lambda x: torch._foreach_mul_([x], [w])):
                with pytest.raises(RuleError, match="turned in place"):
                    give(ours[written])
            with torch.no_grad():
                ours[written].mul_(w)
            plain[written].mul_(2)
            assert all(torch.equal(a.full_tensor(), b) for a, b in zip(ours, plain, strict=True))
            with pytest.raises(RuleError, match="turned in place"):
                ours[turned].requires_grad_()
    del ours, x
    alone = sw.distribute_tensor(torch.ones(4, 3), mesh, [sw.Shard(0)], src_data_rank=None).t_()
    row = alone[1]
    row.mul_(w).sum().backward()  # a view of what it is now
    assert w.grad.full_tensor() == 4


def test_memory_of_what_was_turned_while_views_saw_it_gets_no_graph(ranks) -> None:
    ranks(2, _graphs_of_what_was_turned)


_COPIED = (lambda a: a[::2], lambda a: a.view(-1)[3:27].view(4, 6), lambda a: a[1:2, 1:5])
_TURNED = (torch.Tensor.t_, lambda v: v.unsqueeze_(1), lambda v: v.squeeze_(0))


def _turned_copies() -> None:
    """Of a view that had to copy: writes go on to travel both ways."""
    mesh = rank_mesh((2,), ("dp",))
    placements = (sw.Interleaved(0, 3), sw.Ragged((1, 3), (0, 1)))
    for placement, view, turn in itertools.product(placements, _COPIED, _TURNED):
        full = torch.arange(42.0).view(7, 6)
        x = sw.distribute_tensor(full.clone(), mesh, [placement], src_data_rank=None)
        seen = []
        for base in (full, x):
            turned = turn(view(base))
            turned.mul_(2)
            base.add_(1)
            turned[0].fill_(7.0)
            seen.append((base, turned))
        assert all(torch.equal(b.full_tensor(), a) for a, b in zip(*seen, strict=True))


def test_copies_of_a_cut_change_their_shape_in_place(ranks) -> None:
    ranks(2, _turned_copies)


def _turned_base(x):
    view = x[:, :, 2:]
    x.transpose_(0, 2)
    view.mul_(2)
    x.add_(1)
    return x, view


def _turned_view(x):
    view = x[:, :, 2:]
    part = view[:, 1:]
    view.transpose_(0, 2)
    part.mul_(2)
    return x, view, part


def _resized_base(x):
    view = x[:, :, 2:]
    x.resize_(3, 20, 4)
    x.fill_(2)
    return x, view.sin().shape


def _filled_view(x):
    return torch.cat([x[:, :, 2:] * 2, x[:, :1, 2:] * 3], 1, out=x[:, :, 2:]), x.shape


_OF_ANOTHER_SHAPE = (_turned_base, _turned_view, _resized_base, _filled_view)


def _of_another_shape(program) -> None:
    """All views of the three dims are copies here; ranks have parts of different sizes."""
    warnings.simplefilter("ignore")  # torch says that it resizes what is not empty
    whole = torch.arange(48.0).view(3, 2, 8)
    placed = sw.distribute_tensor(whole.clone(), rank_mesh((3,)), [sw.Ragged((3, 1, 1), (0, 1, 2))])
    for got, wanted in zip(program(placed), program(whole), strict=True):
        assert torch.equal(got.full_tensor(), wanted) if isinstance(got, torch.Tensor) else got == wanted


@pytest.mark.parametrize("program", _OF_ANOTHER_SHAPE)
def test_what_has_copied_views_gets_another_shape(ranks, program) -> None:
    """Ranks raised or waited, as the parts of views were told by the new shape."""
    ranks(3, _of_another_shape, program, timeout=20)


def _vector_times_matrix(vector, matrix) -> None:
    mesh = rank_mesh((2,), ("dp",))
    v, m = torch.randn(5, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    (v @ m).square().sum().backward()
    left = sw.distribute_tensor(v.detach(), mesh, [vector], src_data_rank=None).requires_grad_()
    right = sw.distribute_tensor(m.detach(), mesh, [matrix], src_data_rank=None).requires_grad_()
    (left @ right).square().sum().backward()
    torch.testing.assert_close(left.grad.full_tensor(), v.grad)
    torch.testing.assert_close(right.grad.full_tensor(), m.grad)


@pytest.mark.parametrize("matrix", [sw.Shard(0), sw.Shard(1), sw.Replicate()], ids=str)
@pytest.mark.parametrize("vector", [sw.Shard(0), sw.Replicate(), sw.Partial()], ids=str)
def test_a_vector_times_a_matrix(ranks, vector, matrix):
    ranks(2, _vector_times_matrix, vector, matrix)


def _causal_attention_by_its_formula(placement) -> None:
    mesh = rank_mesh((2,), ("dp",))
    plain = [torch.randn(2, 4, 6, 8, requires_grad=True) for _ in range(3)]
    cut = [
        sw.distribute_tensor(x.detach(), mesh, [placement], src_data_rank=None).requires_grad_()
        for x in plain
    ]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        wanted = torch.nn.functional.scaled_dot_product_attention(*plain, is_causal=True)
        got = torch.nn.functional.scaled_dot_product_attention(*cut, is_causal=True)
    wanted.square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close(got.full_tensor(), wanted)
    for c, p in zip(cut, plain, strict=True):
        torch.testing.assert_close(c.grad.full_tensor(), p.grad)


@pytest.mark.parametrize("placement", [sw.Shard(0), sw.Shard(1), sw.Shard(2), sw.Partial()], ids=str)
def test_the_causal_mask_that_torch_makes_counts_as_replicated(ranks, placement):
    ranks(2, _causal_attention_by_its_formula, placement)


def _sum_of_two_parameters() -> None:
    from shardwright.parallel import parallelize_replicate

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))

        def forward(self, x):
            return (self.a + self.b) * x

    model = parallelize_replicate(Two(), rank_mesh((2,), ("dp",)))
    with sw.trace() as trace:
        model(torch.arange(3.0)).sum().backward()
    assert not trace.collectives
    for p in model.parameters():
        assert p.grad.placements == (sw.Partial(),)
        assert torch.equal(p.grad.full_tensor(), 2 * torch.arange(3.0))


def test_a_gradient_that_two_parameters_share_stays_pending_for_both(ranks):
    ranks(2, _sum_of_two_parameters)

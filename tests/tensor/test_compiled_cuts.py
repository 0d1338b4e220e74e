"""Graphs of what is computed over a cut dim: beside one device, and beside what ran without a graph."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.index.runs import Run
from shardwright.rules.held_label import Held
from shardwright.tensor.views import write_back
from shardwright.testing.meshes import rank_mesh
from shardwright.views.local import LocalView
from tests.tiers import only


def _holes():
    """Two pieces of a label, which no range is."""
    return Held(8, (Run(offset=0, size=2, stride=6, repeat=2),))


def test_indices_that_a_graph_asked_for_are_not_kept_for_those_who_have_values():
    with FakeTensorMode():
        assert isinstance(_holes().positions(), FakeTensor)
        assert all(isinstance(x, FakeTensor) for x in _holes().locate(torch.zeros(2, dtype=torch.int64)))
    assert _holes().positions().tolist() == [0, 1, 6, 7]
    local, here = _holes().locate(torch.tensor([6, 3]))
    assert local.tolist() == [2, 0]
    assert here.tolist() == [True, False]
    with FakeTensorMode():
        assert isinstance(_holes().positions(), FakeTensor)


def test_a_local_view_whose_strides_do_not_merge_is_a_copy_in_a_graph_too():
    view = LocalView((24,), None, None, overlaps=False)
    _, copied = view.take(torch.randn(4, 6).t())
    with FakeTensorMode():
        found, in_graph = view.take(torch.randn(4, 6).t())
    assert (copied, in_graph, found.shape) == (True, True, (24,))


def _normed(x):
    return functional.group_norm(x, 2).square().sum()


def _heads(x):
    """What attention of torch makes of queries, keys and values in one matrix."""
    parts = x.view(*x.shape[:-1], 3, 8).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
    query, key, value = (part.view(5, 14, 4).transpose(0, 1) for part in (parts[0], parts[1], parts[2]))
    return (query @ key.mT @ value).square().sum()


def _several(x):
    return x @ x.mT, x.square().sum(), [x.sin()]


def _read_in_turn():
    """Of several results each is the only one that the loss reads, once."""
    whole = torch.randn((4, 3), generator=torch.Generator().manual_seed(3)).requires_grad_()
    x = sw.distribute_tensor(whole.detach(), rank_mesh((2,)), [sw.Shard(0)], src_data_rank=None)
    x.requires_grad_()
    called = torch.compile(_several, backend="aot_eager")
    for read in (lambda out: out[1], lambda out: out[0].sum(), lambda out: out[2][0].sum()):
        read(_several(whole)).backward()
        read(called(x)).backward()
        torch.testing.assert_close(x.grad.full_tensor(), whole.grad)


def test_a_loss_may_leave_results_of_a_graph_unread(ranks):
    """A model returns logits beside its loss: torch made plain zeros of their gradient, and refused them."""
    ranks(2, _read_in_turn)


def _computes(function, shape, placement, ways=(True, False, True)):
    """Compiled, as it is, and compiled anew: on every rank what one device has."""
    full = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    whole = full.clone().requires_grad_()
    wanted = function(whole)
    wanted.backward()
    mesh = rank_mesh((2,))
    for compiled in ways:
        torch._dynamo.reset()
        called = torch.compile(function, backend="aot_eager") if compiled else function
        x = sw.distribute_tensor(full, mesh, [placement], src_data_rank=None).requires_grad_()
        with sw.spmd(mesh):
            found = called(x)
        found.backward()
        torch.testing.assert_close(found.detach().full_tensor(), wanted.detach())
        torch.testing.assert_close(x.grad.full_tensor(), whole.grad)


def test_group_norm_over_cut_channels_compiles_before_and_after_it_ran(ranks):
    ranks(2, _computes, _normed, (3, 10, 2, 2), sw.ZigZag(1), fresh=True)


def test_heads_of_a_matrix_that_is_cut_through_them_compile(ranks):
    ranks(2, _computes, _heads, (5, 7, 24), sw.Interleaved(2, 2), (True,), fresh=True)


def _writes_of_a_move(before, after):
    """How many ops of the graph of a move of many parts write."""
    torch._dynamo.reset()
    x = sw.distribute_tensor(torch.randn(47), rank_mesh((2,)), [before], src_data_rank=None)
    targets = []

    def noted(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    moved = torch.compile(
        lambda x: x.redistribute(placements=[after]), backend=aot_autograd(fw_compiler=noted)
    )
    torch.testing.assert_close(moved(x).full_tensor(), x.full_tensor())
    return [target for target in targets if "aten.copy" in target or "scatter" in target], len(targets)


def test_a_move_of_many_parts_is_few_ops_of_a_graph(ranks):
    """A write in a graph makes the whole anew, and has a node for each view on the way."""
    among_ranks, inside = sw.Interleaved(0, 3), sw.Fused(0, (3, 1, 4, 2))
    for before, after in ((sw.Interleaved(0, 5), among_ranks), (sw.Replicate(), inside)):
        for writes, nodes in ranks(2, _writes_of_a_move, before, after):
            assert (writes, nodes < 30) == ([], True), nodes


def _written(x):
    """Into parts of views, of which one rank holds nothing."""
    y = x * 2
    y.view(-1)[3:11].add_(1)
    y.t()[0] = 3.0
    y.view(2, 2, 6)[1, ::2, 1:4:2].mul_(x[0, :2])
    y.view(24)[22:].mul_(x[3, 4:])
    z = functional.channel_shuffle(x.view(1, 4, 6), 2)
    z.diagonal(1, 1, 2).mul_(x[:, 0])
    marks = y > 0
    marks[1:3].logical_and_(x[:2] > 0)  # bools, of which torch writes none through an expansion
    y = y * marks * z
    return y.square().sum()


@pytest.mark.parametrize(
    "placement", only([sw.Shard(0)], [sw.Shard(0), sw.Shard(1), sw.Replicate()]), ids=str
)
def test_what_is_written_into_a_part_of_a_view_is_written_in_a_graph_too(ranks, placement):
    ranks(2, _computes, _written, (4, 6), placement, (True,))


def _kept(x):
    """Two products of which the first is sent, computed again in the backward."""
    return checkpoint(lambda x: (x.t() @ x).tanh() @ x.t(), x, use_reentrant=False).square().sum()


def test_a_checkpoint_in_a_graph_sends_in_the_forward_alone(ranks):
    ranks(2, _computes, _kept, (4, 6), sw.Shard(0), (True,))


def _listed():
    """Each number is asked of the rank that has it, while Dynamo reads what the list is made of."""
    torch._dynamo.reset()
    full = torch.arange(6).view(3, 2)
    x = sw.distribute_tensor(full, rank_mesh((2,)), [sw.Shard(0)], src_data_rank=None)
    assert torch.compile(lambda x: x.tolist(), backend="aot_eager")(x) == full.tolist()


def test_a_list_of_numbers_is_read_on_ranks_that_hold_none_of_them(ranks):
    ranks(2, _listed)


def _across_the_cut(x):
    """Computed in place on what was moved, which lies as the transposed parts do."""
    y = x.mT * 1
    y.cumsum_(2)
    z = x.mT * 2
    z.masked_scatter_(z > 0, x.exp())
    return (y * z).square().sum()


@pytest.mark.parametrize("dim", only([1], [0, 1, 2]))
def test_what_is_written_across_a_cut_lies_as_a_graph_has_it(ranks, dim):
    ranks(2, _computes, _across_the_cut, (4, 2, 2), sw.Shard(dim), (True,))


def _slice_of_a_buffer(values, start):
    """The same values, that begin at any place of a buffer."""
    buffer = torch.full((values.numel() + 7,), torch.nan)
    return buffer[start : start + values.numel()].view(values.shape).copy_(values)


def _moved_from_buffers(before, after):
    """What a graph is given lies elsewhere in its storage than what it was made for."""
    mesh = rank_mesh((2,), ("tp",))
    full = torch.arange(24.0).view(4, 6)
    source, target = (sw.distribute_tensor(full, mesh, [p], src_data_rank=None) for p in (before, after))
    torch._dynamo.reset()
    move = torch.compile(lambda x: x.redistribute(placements=[after]) * 2, backend="aot_eager")
    for start in (0, 5, 3):
        local = _slice_of_a_buffer(source.to_local(), start)
        x = sw.DTensor.from_local(local, mesh, [before], shape=full.shape, stride=full.stride())
        x = x.detach().requires_grad_()
        y = move(x)
        assert torch.equal(y.full_tensor(), 2 * full)
        local = _slice_of_a_buffer(target.to_local(), 5 - start)
        y.backward(sw.DTensor.from_local(local, mesh, [after], shape=full.shape, stride=full.stride()))
        assert torch.equal(x.grad.full_tensor(), 2 * full)


@pytest.mark.parametrize(
    ("before", "after"),
    [(sw.Shard(0), sw.Replicate()), (sw.Shard(0), sw.Shard(1)), (sw.BlockCyclic(1, 1), sw.Interleaved(0, 2))],
    ids=str,
)
def test_a_graph_moves_what_lies_anywhere_in_its_storage(ranks, before, after):
    ranks(2, _moved_from_buffers, before, after)


def _clamped(x):
    y = x * 1
    return y.narrow(0, 2, 1).clamp_(0.5, 1)


def _clamped_on_one_rank():
    """One rank's gradient is that of a slice, which begins elsewhere than it did in the trace."""
    mesh = rank_mesh((2,), ("tp",))
    x = sw.distribute_tensor(torch.full((4,), 0.75), mesh, [sw.BlockCyclic(0, 3)], src_data_rank=None)
    x.requires_grad_()
    torch._dynamo.reset()
    y = torch.compile(_clamped, backend="aot_eager")(x)
    y.backward(torch.ones_like(y))
    assert x.grad.full_tensor().tolist() == [0, 0, 1, 0]


def test_a_gradient_of_a_written_slice_is_moved_in_a_graph(ranks):
    ranks(2, _clamped_on_one_rank)


def _written_slice(x):
    x[1:5, ::2].mul_(2)
    return x * 1


_SEEN = {
    "strided": lambda x: x.as_strided((3, 4), (2, 1), 1) * 2,
    "slice": lambda x: x[1:5, ::2] * 2,
    "windows": lambda x: x.unfold(1, 2, 2).exp(),
    "joined": lambda x: torch.cat([x, x[:2]]),
    "written": _written_slice,
}


def _seen_in_buffers():
    """Views of what a graph is given, which begins elsewhere in its storage than in the call before."""
    mesh, full = rank_mesh((2,), ("tp",)), torch.arange(36.0).view(6, 6)
    alive = len(write_back.origins)
    for name, function in _SEEN.items():
        for placement in (sw.Shard(0), sw.Ragged((1, 2), (0, 1))):
            torch._dynamo.reset()
            compiled = torch.compile(function, backend="aot_eager")
            part = sw.distribute_tensor(full, mesh, [placement], src_data_rank=None).to_local()
            for start in (0, 3):
                local = _slice_of_a_buffer(part, start)
                x = sw.DTensor.from_local(local, mesh, [placement], shape=full.shape, stride=full.stride())
                wanted = function(full.clone())
                assert torch.equal(compiled(x).full_tensor(), wanted), (name, placement, start)
    assert len(write_back.origins) <= alive  # known calls with values do not ask the views of a trace


def test_a_graph_sees_views_of_what_lies_anywhere_in_its_storage(ranks):
    ranks(2, _seen_in_buffers, timeout=120)


def _attends(x, w):
    """The gradients of three weights read `x` moved: one rank sends one run of it, its peer rows of it."""
    heads = ((x @ w[i]).unflatten(-1, (4, 4)).transpose(1, 2) for i in range(3))
    return functional.scaled_dot_product_attention(*heads, is_causal=True).square().sum()


def _merged():
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(*shape, generator=generator).requires_grad_() for shape in ((2, 8, 16), (3, 16, 16))]
    mesh = rank_mesh((2,), ("x",))
    places = ([sw.ZigZag(1)], [sw.Replicate()])
    given = [
        sw.distribute_tensor(x.detach(), mesh, p).requires_grad_() for x, p in zip(plain, places, strict=True)
    ]
    torch._dynamo.reset()
    found, wanted = torch.compile(_attends, backend="aot_eager")(*given), _attends(*plain)
    torch.testing.assert_close(found.full_tensor(), wanted)
    found.backward()
    wanted.backward()
    for x, y in zip(given, plain, strict=True):
        torch.testing.assert_close(x.grad.full_tensor(), y.grad)


def test_equal_moves_of_a_graph_are_as_many_on_each_rank(ranks):
    """A rank that merged them had its peer wait for ever."""
    ranks(2, _merged, timeout=60)

"""Compiled moves and views of a dim of several lengths: values and gradients of one device at each."""

import warnings
from math import prod

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from shardwright.testing.meshes import rank_mesh
from tests.tiers import only

_SHARD, _WHOLE, _COLUMNS = [sw.Shard(0)], [sw.Replicate()], [sw.Shard(1)]


def _to(placements):
    return lambda x: x.redistribute(placements=placements) if isinstance(x, sw.DTensor) else x


# What is computed, and where its rows lie before. Moves: a gather, a part, a sum, its parts, an exchange.
_PROGRAMS = {
    "gather": (_SHARD, lambda x: _to(_WHOLE)(x * 2).sin().cumsum(1).sum()),
    "take": (_WHOLE, lambda x: _to(_SHARD)(x * 2).sin().cumsum(1).sum()),
    "sum": (_COLUMNS, lambda x: _to(_WHOLE)(x @ x.t()).sin().sum()),
    "scatter": (_COLUMNS, lambda x: _to(_SHARD)(x @ x.t()).sin().sum()),
    "exchange": (_SHARD, lambda x: _to(_COLUMNS)(x * 2).cumsum(0).sin().sum()),
    "slice": (_SHARD, lambda x: x[1 : x.shape[0] - 1].square().sum()),
    "columns": (_SHARD, lambda x: x[:, 1:3].sin().sum()),
    "pieces": (_SHARD, lambda x: sum(c.sin().sum() * n for n, c in enumerate(x.chunk(2)))),
    "padded": (_COLUMNS, lambda x: torch.nn.functional.pad(x, (1, 1)).cos().sum()),
    "accumulated": (_SHARD, lambda x: torch.cumsum(x * x.shape[0], 0).square().sum()),
}

# Of moves a gather, a sum and an exchange; of views one that begins elsewhere; a padding, and running sums.
_OFTEN = ["gather", "scatter", "exchange", "slice", "padded", "accumulated"]
_LENGTHS = [(4, 6, 7), pytest.param((7, 8, 12, 5), marks=pytest.mark.slow)]


def _like_one_device(name, sizes):
    warnings.simplefilter("ignore")  # torch's own, while it traces
    torch._dynamo.reset()
    mesh = rank_mesh((dist.get_world_size(),), ("tp",))
    placements, program = _PROGRAMS[name]
    compiled = torch.compile(program, backend="aot_eager")
    for n in sizes:
        whole = torch.randn(n, 4, generator=torch.Generator().manual_seed(n)).double().requires_grad_()
        x = sw.distribute_tensor(whole.detach(), mesh, placements).requires_grad_()
        wanted, got = program(whole), compiled(x)
        torch.testing.assert_close(got.full_tensor(), wanted)
        wanted.backward()
        got.backward()
        torch.testing.assert_close(x.grad.full_tensor(), whole.grad)
    torch._dynamo.reset()


@pytest.mark.parametrize("sizes", _LENGTHS, ids=str)
@pytest.mark.parametrize("name", only(_OFTEN, _PROGRAMS))
def test_each_length_of_a_dim_is_right(ranks, name, sizes):
    """Even ones, of which one graph may hold, and such that the ranks do not divide, before and after."""
    ranks(2, _like_one_device, name, sizes, timeout=120)


_SUM = [sw.Partial("sum")]
_MOVES = [
    ((2,), _SHARD, _COLUMNS, (7, 9, 13)),
    ((2,), _SUM, _COLUMNS, (6, 8, 64)),
    ((2,), _SUM, _SHARD, (7, 9, 65)),
]
_MORE_MOVES = [
    *[
        ((2,), a, b, (7, 9, 65))
        for a in (_SHARD, _COLUMNS, _WHOLE)
        for b in (_SHARD, _COLUMNS, _WHOLE, _SUM)
        if a != b
    ],
    *[((4,), a, b, (21, 29, 45)) for a, b in [(_SHARD, _COLUMNS), (_COLUMNS, _WHOLE), (_SUM, _SHARD)]],
    ((2, 2), _SHARD * 2, _WHOLE * 2, (21, 29, 37)),
    ((2, 2), _SHARD + _COLUMNS, _COLUMNS + _SHARD, (21, 29, 37)),
    ((2, 2), _SHARD + _SUM, _WHOLE + _SHARD, (20, 28, 36)),
    ((2, 2), _SUM + _SHARD, _COLUMNS + _SHARD, (22, 26, 30)),
]


def _in_one_graph(shape, before, after, sizes):
    """The first size has a graph of numbers, all others share one; the loss lies outside."""
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    mesh = rank_mesh(shape, ("dp", "tp")[: len(shape)])
    compiled = torch.compile(lambda x: _to(after)(x * 2) * 3, backend="aot_eager")
    for n in sizes:
        whole = torch.randn(n, 5, generator=torch.Generator().manual_seed(n)).double().requires_grad_()
        x = sw.distribute_tensor(whole.detach(), mesh, before).requires_grad_()
        wanted, got = whole * 6, compiled(x)
        torch.testing.assert_close(got.full_tensor(), wanted)
        wanted.sin().sum().backward()
        got.full_tensor().sin().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), whole.grad)
    assert graphs["unique_graphs"] == 2
    torch._dynamo.reset()


@pytest.mark.parametrize(("shape", "before", "after", "sizes"), only(_MOVES, _MOVES + _MORE_MOVES), ids=str)
def test_a_move_is_one_graph_for_sizes_that_leave_one_rest(ranks, shape, before, after, sizes):
    """Uneven cuts, several axes and other terms than of whole rows had a graph for each size."""
    ranks(prod(shape), _in_one_graph, shape, before, after, sizes, timeout=120)


_SUMS = {
    "all": lambda x: x.sin().sum(),
    "alone": lambda x: x.sum(),
    "alone by rows": lambda x: x.sum(1),
    "rows": lambda x: x.sin().sum(1),
    "columns": lambda x: x.sin().sum(0, keepdim=True) * 2,
    "moved": lambda x: _to(_COLUMNS)(x * 2).sin().sum(0),
    "sent back": lambda x: _to(_COLUMNS if x.shape[1] > 4 else _SHARD)(x * 2).sum(0),
}


def _sums(name, before, sizes, most):
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    mesh, program = rank_mesh((dist.get_world_size(),), ("tp",)), _SUMS[name]
    compiled = torch.compile(program, backend="aot_eager")
    for n in sizes:
        whole = torch.randn(n, 5, generator=torch.Generator().manual_seed(n)).double().requires_grad_()
        x = sw.distribute_tensor(whole.detach(), mesh, before).requires_grad_()
        wanted, got = program(whole), compiled(x)
        torch.testing.assert_close(got.full_tensor(), wanted)
        wanted.cos().sum().backward()
        got.full_tensor().cos().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), whole.grad)
    assert graphs["unique_graphs"] <= most
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "before", "most"),
    only(
        [("all", _SHARD, 2), ("sent back", _SHARD, 4)],
        [
            *[
                (name, before, 2)
                for name in ("all", "alone", "alone by rows", "rows", "columns")
                for before in (_SHARD, _COLUMNS)
            ],
            ("moved", _SHARD, 4),
            ("sent back", _SHARD, 4),
        ],
    ),
    ids=str,
)
def test_sums_of_any_length_have_one_graph(ranks, name, before, most):
    """Their gradients repeat an element: each length had a graph, as one has that is sent on."""
    ranks(2, _sums, name, before, (7, 9, 13, 21), most, timeout=120)


def _of_other_examples(name):
    """On rank 0 a length is a symbol from the first call on, as it has run on plain rows of another one."""
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    placements, program = _PROGRAMS[name]
    compiled = torch.compile(program, backend="aot_eager")
    if dist.get_rank() == 0:
        compiled(torch.randn(4, 4))
    for n in (6, 160):  # terms that go whole, and such that are summed by the backend
        rows = torch.randn(n, 4, generator=torch.Generator().manual_seed(n)).double()
        x = sw.distribute_tensor(rows, rank_mesh((2,), ("tp",)), placements)
        torch.testing.assert_close(compiled(x).full_tensor(), program(rows))
    torch._dynamo.reset()


@pytest.mark.parametrize("name", only(["sum"], ["gather", "sum", "scatter", "exchange"]))
def test_graphs_of_one_length_and_of_any_send_the_same(ranks, name):
    """A pending sum of few rows went whole in the one and to the backend's sum in the other: both waited."""
    ranks(2, _of_other_examples, name, timeout=120)


def _other_layouts():
    """What a graph of any length was made for whole tensors, on pending sums of the same parts."""
    torch._dynamo.reset()
    mesh = rank_mesh((2,), ("tp",))
    compiled = torch.compile(lambda x: x.sin().sum(), backend="aot_eager", dynamic=True)
    for n, placements, terms in ((4, _WHOLE, 1), (6, _WHOLE, 1), (8, [sw.Partial("sum")], 2), (8, _WHOLE, 1)):
        rows = torch.randn(n, 4, generator=torch.Generator().manual_seed(n))
        got = compiled(sw.DTensor.from_local(rows, mesh, placements))
        torch.testing.assert_close(got.full_tensor(), (rows * terms).sin().sum())
    torch._dynamo.reset()


def test_a_graph_of_any_length_is_of_one_layout(ranks):
    ranks(2, _other_layouts, timeout=120)


def _two_pending():
    torch._dynamo.reset()
    mesh, compiled = rank_mesh((2,), ("tp",)), torch.compile(torch.mul, backend="aot_eager")
    for n in (4, 6, 8):
        rows = torch.randn(n, n + 1, generator=torch.Generator().manual_seed(n))
        terms = [sw.DTensor.from_local(rows * scale, mesh, [sw.Partial("sum")]) for scale in (1, 2)]
        torch.testing.assert_close(compiled(*terms).full_tensor(), rows * 2 * rows * 4)
    torch._dynamo.reset()


def test_operands_that_are_moved_may_have_lengths_of_their_own(ranks):
    """Each had a symbol of its own, and numbers in which they differ were tried: an error of broadcasting."""
    ranks(2, _two_pending, timeout=120)


class _Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.up = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 8, bias=False)

    def forward(self, tokens):
        return self.up(self.table(tokens)).sin()


def _looked_up():
    """The backward of a look-up, whose gradient is pending, asks for lengths that were symbols before."""
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    mesh = rank_mesh((2,), ("tp",))
    plain, model = _Model(), sw.distribute_module(_Model(), mesh, {"up.weight": _SHARD})
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for n in (4, 6, 7):
        tokens = torch.arange(2 * n).remainder(6).view(2, n)
        plain.zero_grad()
        model.zero_grad()
        wanted = plain(tokens)
        with sw.spmd(mesh, check=False):
            got = compiled(tokens)
            torch.testing.assert_close(got.full_tensor(), wanted)
            got.square().sum().backward()
        wanted.square().sum().backward()
        for name, p in plain.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), p.grad)
    torch._dynamo.reset()


def test_a_backward_that_asks_for_lengths_is_right(ranks):
    ranks(2, _looked_up, timeout=120)

"""Compiled programs that meet several sizes: values and gradients of one device, in few graphs."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import shardwright as sw
from shardwright.parallel import parallelize_tensor
from shardwright.testing.meshes import rank_mesh
from tests.tiers import only

_SIZES = (8, 12, 16, 12)  # three sizes, each even in halves and quarters


def _mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


def _by_names(mesh):
    cuts = {"0.weight": {"tp": sw.Shard(0)}, "0.bias": {"tp": sw.Shard(0)}, "2.weight": {"tp": sw.Shard(1)}}
    return sw.distribute_module(_mlp(), mesh, cuts)


def _from_local(mesh, backend):
    """The whole batch from rows that each rank has, made inside the graph; the rows lie in zigzag."""
    model = _by_names(mesh)

    def step(rows):
        return model(sw.DTensor.from_local(rows, mesh, [sw.ZigZag(0)]))

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    return model, lambda x: compiled(sw.distribute_tensor(x, mesh, [sw.ZigZag(0)]).to_local())


def _from_local_by_name(mesh, backend):
    model = _by_names(mesh)

    def step(x):
        return model(sw.DTensor.from_local(x, mesh, {"tp": sw.Replicate()}, grad_placements=[sw.Replicate()]))

    return model, torch.compile(step, fullgraph=True, backend=backend)


def _given(mesh, backend):
    """A distributed batch as the graph's input."""
    model = _by_names(mesh)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    return model, lambda x: compiled(sw.distribute_tensor(x, mesh, [sw.Shard(0)]))


def _styles(mesh, backend):
    model = parallelize_tensor(_mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model, torch.compile(model, fullgraph=True, backend=backend)


_WAYS = {
    "from_local": _from_local,
    "from_local by name": _from_local_by_name,
    "an input": _given,
    "torch's styles": _styles,
}


# The second size makes a dim a symbol. Where rows are cut, what is cheapest depends on how many there are.
_GRAPHS = {"from_local": 3, "from_local by name": 2, "an input": 2, "torch's styles": 2}


def _full(x):
    return x.full_tensor() if isinstance(x, sw.DTensor) else x


def _like_one_device(way, backend, sizes, graphs):
    warnings.simplefilter("ignore")  # torch's own, while it traces
    torch._dynamo.reset()
    mesh = rank_mesh((dist.get_world_size(),), ("tp",))
    plain = _mlp()
    counter = CompileCounterWithBackend(backend)
    model, compiled = way(mesh, counter)
    for n in sizes:
        x = torch.randn(n, 4)
        wanted, got = plain(x), compiled(x)
        torch.testing.assert_close(_full(got), wanted)
        wanted.square().sum().backward()
        got.square().sum().backward()
        for name, p in plain.named_parameters():
            torch.testing.assert_close(_full(model.get_parameter(name).grad), p.grad)
    if graphs is not None:
        assert counter.frame_count == graphs, f"{counter.frame_count} graphs"
    torch._dynamo.reset()


def _ways(backend, sizes):
    for name, way in _WAYS.items():
        _like_one_device(way, backend, sizes, _GRAPHS[name])


@pytest.mark.parametrize("backend", only(["eager"], ["eager", "aot_eager"]))
def test_sizes_of_a_batch_share_a_graph_where_they_decide_nothing(ranks, backend):
    ranks(2, _ways, backend, _SIZES, timeout=170)


def _rows(mesh, backend):
    """Rows that are cut, in any number: of 7 the ranks have 4 and 3."""
    model = sw.distribute_module(_mlp(), mesh, {})
    compiled = torch.compile(model, fullgraph=True, backend=backend)

    def step(x):
        rows = sw.distribute_tensor(x, mesh, [sw.Shard(0)])
        torch._dynamo.mark_dynamic(rows, 0)
        return compiled(rows)

    return model, step


def _marked():
    _like_one_device(_rows, "aot_eager", (8, 12, 7), 1)
    rows = sw.distribute_tensor(torch.ones(8, 4), rank_mesh((2,), ("tp",)), [sw.Shard(0)])
    torch._dynamo.decorators.mark_unbacked(rows, 0)
    with pytest.raises(Exception, match=r"dim 0 has no example of its size.*\n  fix: .*mark_dynamic"):
        torch.compile(torch.sin, backend="eager")(rows)


def test_a_marked_dim_has_one_graph_for_all_sizes(ranks):
    """It was an error of Dynamo about a constant."""
    ranks(2, _marked, timeout=120)


_ASKING = {
    "a reversal": (0, lambda x: torch.flip(x * x.shape[0], (0,)).square().cos().sum()),
    "a norm": (1, lambda x: nn.functional.rms_norm(x.t(), x.shape[:1])),
}


def _asked_in_the_backward(name):
    """A reversal of the cut dim is decided by sizes; the mean in a norm divides by one, beside none of it."""
    torch._dynamo.reset()
    mesh, (dim, program) = rank_mesh((2,), ("tp",)), _ASKING[name]
    compiled = torch.compile(program, backend="aot_eager")
    for n in (4, 6, 8):
        whole = torch.randn(n, 3, generator=torch.Generator().manual_seed(n)).requires_grad_()
        x = sw.distribute_tensor(whole.detach(), mesh, [sw.Shard(dim)]).requires_grad_()
        wanted, got = program(whole), compiled(x)
        torch.testing.assert_close(got.full_tensor(), wanted)
        wanted.sin().sum().backward()
        got.sin().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), whole.grad)


@pytest.mark.parametrize("name", _ASKING)
def test_a_size_that_a_graph_asks_for_is_guarded(ranks, name):
    ranks(2, _asked_in_the_backward, name, timeout=120)


F = nn.functional
_LOSSES = {
    "a mean": (lambda out, y: out.square().mean(), torch.randn),
    "mse": (F.mse_loss, torch.randn),
    "cross entropy": (F.cross_entropy, lambda n, c: torch.arange(n) % c),
}
_WEIGHTS_CUT = {"0.weight": {"tp": sw.Shard(0)}, "2.weight": {"tp": sw.Shard(1)}}


def _rows_of_4(n):
    return torch.randn(n, 4)


def _look_up():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4))


_MEANS = {name: (*loss, _mlp, {}, _rows_of_4) for name, loss in _LOSSES.items()} | {
    "cut weights": (*_LOSSES["mse"], _mlp, _WEIGHTS_CUT, _rows_of_4),
    "an embedding": (*_LOSSES["mse"], _look_up, {}, lambda n: torch.arange(n) % 5),
}


def _mean_of_a_cut_batch(name):
    """Two graphs: of the first size, and of all that come after."""
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    mesh, (loss, targets, model, cuts, inputs) = rank_mesh((2,), ("tp",)), _MEANS[name]
    plain, ours = model(), sw.distribute_module(model(), mesh, cuts)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, y: loss(ours(x), y), backend=counter, fullgraph=True)
    for n in (8, 12, 20, 16):
        x, y = inputs(n), targets(n, 4)
        plain.zero_grad()
        ours.zero_grad()
        wanted = loss(plain(x), y)
        got = compiled(*[sw.distribute_tensor(v, mesh, [sw.Shard(0)]) for v in (x, y)])
        torch.testing.assert_close(got.full_tensor(), wanted)
        wanted.backward()
        got.backward()
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(q.grad.full_tensor(), p.grad)
    assert counter.frame_count == 2, f"{counter.frame_count} graphs"


@pytest.mark.parametrize("name", only(["an embedding"], _MEANS))
def test_the_mean_loss_of_a_cut_batch_has_one_graph(ranks, name):
    ranks(2, _mean_of_a_cut_batch, name, timeout=170)


def _on_both_sides_of_a_choice():
    """Up to 15 rows these move, from 16 on the weight: a graph of the first size, and one for each range."""
    torch._dynamo.reset()
    mesh, weight = rank_mesh((2,), ("tp",)), torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
    cut = sw.distribute_tensor(weight, mesh, [sw.Shard(1)])
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(torch.mm, backend=counter, fullgraph=True)
    for n in (12, 10, 14, 40, 16, 1000):
        x = torch.randn(n, 16, generator=torch.Generator().manual_seed(n))
        got = compiled(sw.distribute_tensor(x, mesh, [sw.Shard(0)]), cut)
        assert got.placements == (sw.Shard(0 if n > 15 else 1),)
        torch.testing.assert_close(got.full_tensor(), x @ weight)
    assert counter.frame_count == 3, f"{counter.frame_count} graphs"


def test_what_is_cheapest_for_some_sizes_has_one_graph_for_these(ranks):
    ranks(2, _on_both_sides_of_a_choice, timeout=120)


def _by_inductor():
    _like_one_device(_from_local, "inductor", (8, 12), 2)


@pytest.mark.slow
def test_inductor_holds_from_local(ranks):
    ranks(2, _by_inductor, timeout=170)


def _heads(model, x):
    return model(x).unflatten(-1, (2, 2)).flatten(-2)


def _around(mesh, backend, check="first"):
    """`spmd` inside of what is compiled: where it compares, torch breaks the graph at the block."""
    model = _by_names(mesh)

    def step(x):
        with sw.spmd(mesh, check=check):
            return _heads(model, x)

    return model, torch.compile(step, backend=backend, fullgraph=not check)


def _inside(mesh, backend, check="first"):
    """What is compiled, called inside `spmd`, on plain tensors."""
    model = _by_names(mesh)
    compiled = torch.compile(partial(_heads, model), backend=backend, fullgraph=not check)

    def step(x):
        with sw.spmd(mesh, check=check):
            return compiled(x)

    return model, step


def _compares(x, mesh):
    with sw.spmd(mesh):
        return x + 1


def _in_blocks():
    _like_one_device(_around, "eager", (8, 12), None)
    _like_one_device(_inside, "eager", (8,), None)
    for way in (_around, _inside):
        with ThreadPoolExecutor(1) as thread:  # which has entered no block yet
            thread.submit(_like_one_device, partial(way, check=False), "eager", (8, 12), 2).result()
    compiled = torch.compile(_compares, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"which no graph holds; fix: spmd\(mesh, check=False"):
        compiled(torch.ones(4), rank_mesh((2,), ("tp",)))


def test_compiled_programs_and_spmd_meet(ranks):
    ranks(2, _in_blocks, timeout=170)


def _sizes_of_equal_parts():
    """5 and 6 rows over two ranks are 3 on the first: only the logical size tells the graphs apart."""
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    mesh = rank_mesh((2,), ("tp",))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: x.flip(0), fullgraph=True, backend=counter)
    for n in (7, 5, 6, 5):
        x = torch.randn(n, 3)
        got = compiled(sw.distribute_tensor(x, mesh, [sw.Shard(0)]))
        torch.testing.assert_close(got.full_tensor(), x.flip(0))
    assert counter.frame_count == 3


def test_a_graph_is_told_by_logical_sizes(ranks):
    ranks(2, _sizes_of_equal_parts, timeout=120)


def _viewed(x, n):
    return x.view(n * 3, 2)


def _viewed_with_sizes_of_others():
    """Those of a view that is taken outside, and those that are computed from a number."""
    warnings.simplefilter("ignore")
    mesh = rank_mesh((2,), ("tp",))
    for outside, inside in ((_viewed, lambda x, n: x), (lambda x, n: x, _viewed)):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        compiled = torch.compile(lambda x, n, inside=inside: inside(x, n).sin(), backend=counter)
        for n in (4, 6, 8):
            x = torch.randn(n, 3, 2)
            rows = sw.distribute_tensor(x, mesh, [sw.Shard(0)])
            torch.testing.assert_close(compiled(outside(rows, n), n).full_tensor(), _viewed(x, n).sin())
        assert counter.frame_count == 2, f"{counter.frame_count} graphs"


def test_a_view_takes_sizes_that_are_no_symbols_of_its_tensor(ranks):
    """It was an internal error of Dynamo: a sharded unit hands its inputs on as views."""
    ranks(2, _viewed_with_sizes_of_others, timeout=120)


_WITH_A_NUMBER = {
    "a factor": lambda x, s: (x * s + 1).sum(),
    "of a pending sum": lambda x, s: x.sum(0) * s,
    "of a largest value": lambda x, s: x.amax(0) * s,
    "beside others": lambda x, s: torch.add(x, x, alpha=s).clamp(min=s) / (s + 1),
}


def _by_a_number(name):
    """The third number has another sign: a largest value becomes the least."""
    function, mesh = _WITH_A_NUMBER[name], rank_mesh((2,), ("x",))
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager")
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    placed = sw.distribute_tensor(x, mesh, [sw.Shard(0)])
    for number in (1.0, 2.0, -3.0, 0.5):
        torch.testing.assert_close(compiled(placed, number).full_tensor(), function(x, number))


@pytest.mark.parametrize("name", _WITH_A_NUMBER)
def test_a_number_that_changes_is_one_graph_or_several(ranks, name):
    """It ended in an error about a number that the graph does not follow."""
    ranks(2, _by_a_number, name)

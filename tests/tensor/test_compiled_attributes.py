"""What a compiled program reads: attributes inside `spmd` after its graph broke, elements of a cut dim."""

import copy
import io
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import shardwright as sw
from shardwright.comm.pack import new_tensor
from shardwright.errors import ImplicitRedistributionError
from shardwright.plan.work import Memory
from shardwright.testing.meshes import rank_mesh
from tests.tiers import one_in


def _facts(x, rows, columns):
    product = rows * columns  # the comparison of the plain operand ends on the host: the graph breaks
    return product, x.device, x.dtype, x.ndim, x.requires_grad


def _compiled():
    mesh = rank_mesh((2,), ("tp",))
    x = sw.distribute_tensor(torch.randn(4, 3), mesh, [sw.Shard(0)])
    rows = sw.distribute_tensor(torch.arange(3.0)[:, None], mesh, [sw.Replicate()])
    with sw.spmd(mesh, check=True):
        product, *facts = torch.compile(_facts, backend="eager")(x, rows, torch.ones(4))
    torch._dynamo.reset()
    assert facts == [torch.device("cpu"), torch.float32, 2, False]
    torch.testing.assert_close(product.full_tensor(), torch.arange(3.0)[:, None].expand(3, 4))


def test_a_compiled_program_reads_the_attributes_that_it_names(ranks):
    """The dtype was the device: a frame compiled for one getter ran for the other."""
    ranks(2, _compiled)


def _moved_if_elsewhere(x):
    y = x * 2
    return y.redistribute({"tp": sw.Shard(1)}) if y._spec.layout.placements[0] != sw.Shard(1) else y


def _moves_after_a_break(placement):
    """Law: where a graph broke before a move, the move runs as it is; no part of it is a graph of its own."""
    mesh = rank_mesh((2,), ("tp",))
    full = torch.randn(7, 6, generator=torch.Generator().manual_seed(1))
    moved = torch.compile(_moved_if_elsewhere, backend="aot_eager")(
        sw.distribute_tensor(full, mesh, [placement])
    )
    assert moved.placements == (sw.Shard(1),)
    torch.testing.assert_close(moved.full_tensor(), full * 2)


@pytest.mark.parametrize("placement", [sw.Shard(0), pytest.param(sw.Partial(), marks=pytest.mark.slow)])
def test_a_move_after_a_break_is_no_graph_of_its_own(ranks, placement):
    ranks(2, _moves_after_a_break, placement)


def _distributes_inside():
    """Law: a graph breaks where a tensor or a module is distributed, or copied, and goes on behind it."""
    mesh = rank_mesh((2,), ("tp",))
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))

    def tensor(x, source):
        return (sw.distribute_tensor(x, mesh, [sw.Shard(0)], src_data_rank=source) * 2).full_tensor()

    for source in (0, None):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(tensor, backend="aot_eager")(x, source), x * 2)

    def copied(x):
        return copy.deepcopy(x) * 2

    cut = sw.distribute_tensor(x, mesh, [sw.Shard(0)])
    assert torch.equal(torch.compile(copied, backend="aot_eager")(cut).full_tensor(), x * 2)

    def module(x, layer):
        return sw.distribute_module(layer, mesh)(sw.distribute_tensor(x, mesh)).full_tensor()

    layer = torch.nn.Linear(4, 3)
    wanted = layer(x)
    torch.testing.assert_close(torch.compile(module, backend="aot_eager")(x, layer), wanted)
    torch._dynamo.reset()


def test_a_compiled_program_distributes(ranks):
    ranks(2, _distributes_inside)


AFTER_A_BREAK = {
    "operators": lambda x: (x @ x.t()).softmax(-1)[1:3] + x.sum(),
    "what moves": lambda x: torch.cat([x.redistribute({"tp": sw.Shard(0)}), x]),
    "a backward": lambda x: x.full_tensor().sum().backward(),
    "what it says": lambda x: (x.grad, x.placements, repr(x), sw.layout_of(x)),
    "new ones": lambda x: sw.randn(4, device_mesh=x.device_mesh, placements=[sw.Shard(0)]),
    "lists": lambda x: sw.redistribute_many([x], [[sw.Shard(0)]]),
    "a copy": copy.copy,
    "pickles": pickle.dumps,
    "saved": lambda x: torch.save(x, io.BytesIO()),
}


def _makes_no_graph_of_the_library(name):
    """Law: what runs as it is inside of a compiled program is compiled nowhere below."""
    from torch._dynamo import convert_frame, eval_frame

    x = sw.distribute_tensor(torch.randn(6, 4), rank_mesh((2,), ("tp",)), [sw.Shard(1)]).requires_grad_()
    program, compiles, compiled = AFTER_A_BREAK[name], convert_frame._compile, set()

    def heard(code, *args, **kwargs):
        compiled.add(code.co_filename)
        return compiles(code, *args, **kwargs)

    def broken():
        program(x)

    if program.__module__ == __name__:
        eval_frame.skip_code(program.__code__)
    eval_frame.skip_code(broken.__code__)
    torch._dynamo.reset()
    convert_frame._compile = heard
    try:
        torch.compile(broken, backend="aot_eager")()
    finally:
        convert_frame._compile = compiles
    assert not [file for file in compiled if Path(sw.__file__).parent in Path(file).parents]


@pytest.mark.parametrize("name", AFTER_A_BREAK)
def test_no_part_of_the_library_is_a_graph_of_its_own(ranks, name):
    ranks(2, _makes_no_graph_of_the_library, name, timeout=170)


LOOKED_UP = {
    "gather": lambda x, i: x.gather(0, i[:, None].expand(4, 5)),
    "embedding": lambda x, i: functional.embedding(i, x),
    "index": lambda x, i: x[i],
    "scatter": lambda x, i: x.scatter(0, i[:, None].expand(4, 5), 1.5),
    "index_add": lambda x, i: x.index_add(0, i, x[:4] * 2),
    "cross_entropy": lambda x, i: functional.cross_entropy(x[:, :4].t(), i),
}


def _looked_up(name):
    """Law: a look-up along a cut dim is one graph, and an index that is out of range raises when it runs."""
    mesh, function = rank_mesh((2,), ("tp",)), LOOKED_UP[name]
    x, i = torch.randn(7, 5, generator=torch.Generator().manual_seed(1)), torch.tensor([3, 0, 6, 1])
    plain, cut = x.clone().requires_grad_(), sw.distribute_tensor(x, mesh, [sw.Shard(0)]).requires_grad_()
    indices = sw.distribute_tensor(i, mesh)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    out, wanted = compiled(cut, indices), function(plain, i)
    torch.testing.assert_close(out.full_tensor(), wanted)
    out.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(cut.grad.full_tensor(), plain.grad)
    if name == "embedding":  # the kernel itself looks up nothing there
        with pytest.raises(RuntimeError, match="out of bounds for dimension with size 7"):
            compiled(cut, indices + 4)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", one_in(2, LOOKED_UP))
def test_a_compiled_program_looks_up_along_a_cut_dim(ranks, name):
    ranks(2, _looked_up, name)


def _compiled_loss():
    mesh = rank_mesh((2,), ("tp",))
    x, labels = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), torch.tensor([3, 0, 5, 1])
    logits, where = sw.distribute_tensor(x, mesh, [sw.Shard(1)]), sw.distribute_tensor(labels, mesh)
    with loss_parallel():
        loss = torch.compile(functional.cross_entropy, backend="aot_eager", fullgraph=True)(logits, where)
    torch._dynamo.reset()
    torch.testing.assert_close(loss.to_local(), functional.cross_entropy(x, labels))


def test_a_compiled_loss_is_replicated_in_loss_parallel(ranks):
    ranks(2, _compiled_loss)


def _explicit(x, w):
    with sw.explicit():
        return (x @ w).relu()


def _opens_blocks():
    mesh = rank_mesh((2,), ("tp",))
    terms = [
        sw.distribute_tensor(torch.ones(4, 4), mesh, [cut], src_data_rank=None)
        for cut in (sw.Shard(1), sw.Shard(0))
    ]
    torch._dynamo.reset()
    compiled = torch.compile(_explicit, backend="aot_eager")
    with pytest.raises(ImplicitRedistributionError):
        compiled(*terms)
    whole = sw.distribute_tensor(torch.ones(4, 4), mesh, src_data_rank=None)
    torch.testing.assert_close(compiled(terms[1], whole).full_tensor(), torch.full((4, 4), 4.0))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="fix: open it around the call of what is compiled"):
        torch.compile(_explicit, backend="aot_eager", fullgraph=True)(*terms)
    torch._dynamo.reset()


def test_a_block_that_allows_no_implicit_move_is_not_passed_over_by_a_graph(ranks):
    """Dynamo read the block and left nothing of it: what was sent for `relu` was sent in silence."""
    ranks(2, _opens_blocks)


def _makes():
    """Law: what no graph can make says why and what to write, and that then makes the same in one graph."""
    mesh = rank_mesh((2,), ("tp",))
    x, cut, model = torch.ones(4, 3), [sw.Shard(0)], nn.Linear(3, 2)
    placed = sw.distribute_tensor(x, mesh, cut)
    made = [(name, (4, 3)) for name in ("zeros", "ones", "empty", "rand", "randn")] + [
        ("full", ((4, 3), 2.0))
    ]
    refused = [
        (partial(getattr(sw, name), *given, device_mesh=mesh, placements=cut), "torch.zeros_like")
        for name, given in made
    ]
    refused += [
        (lambda: sw.distribute_tensor(x, mesh, cut), "DTensor.from_local of each rank's own part"),
        (lambda: sw.distribute_module(model, mesh, {}), "compile its result"),
    ]
    for make, fix in refused:
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=f"which no graph holds; fix: .*{fix}"):
            torch.compile(lambda make=make: make(), backend="eager", fullgraph=True)()

    def instead(x, part):
        zeros, ones = torch.zeros_like(x), x.new_ones((4, 3))
        return zeros + ones, sw.DTensor.from_local(part, mesh, cut)

    torch._dynamo.reset()
    for ones in torch.compile(instead, backend="aot_eager", fullgraph=True)(placed, placed.to_local()):
        torch.testing.assert_close(ones.full_tensor(), x)
    torch._dynamo.reset()


def test_what_no_graph_makes_says_what_to_write(ranks):
    """`distribute_tensor` gave "reason: None", a factory the inside of Dynamo's dicts."""
    ranks(2, _makes, timeout=60)


def _halves():
    """Law: ranks that hold nothing of a part part forward and backward as the others do, and nobody waits."""
    mesh, x = rank_mesh((2,), ("tp",)), torch.randn(8, 3, generator=torch.Generator().manual_seed(1))

    def first_rows(x):
        return [half.redistribute(mesh, [sw.Replicate()]).to_local()[0] for half in torch.tensor_split(x, 2)]

    plain, cut = x.clone().requires_grad_(), sw.distribute_tensor(x, mesh, [sw.Shard(0)]).requires_grad_()
    made = torch.compile(first_rows, backend="aot_eager", fullgraph=True)(cut)
    torch._dynamo.reset()
    wanted = [half[0] for half in torch.tensor_split(plain, 2)]
    torch.testing.assert_close(made, wanted)
    sum(made).sum().backward()
    sum(wanted).sum().backward()
    torch.testing.assert_close(cut.grad.full_tensor(), plain.grad)


def test_a_compiled_gradient_of_a_part_that_one_rank_holds(ranks):
    ranks(2, _halves, timeout=30)


def test_memory_in_a_graph_depends_on_what_it_is_like():
    """Law: else torch takes it for part of the forward, on ranks that hold nothing of a gradient alone."""
    graph = make_fx(lambda x: new_tensor(x, Memory((0, 4), (4, 1))))(torch.ones(3)).graph
    assert next(iter(graph.nodes)).users

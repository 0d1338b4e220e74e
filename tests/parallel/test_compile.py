"""`torch.compile(fullgraph=True)` of placed modules: train, eval, no_grad, with one device's gradients."""

import copy
import warnings
from collections import OrderedDict
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import loss_parallel

import shardwright as sw
from shardwright.parallel import parallelize_replicate, parallelize_tensor
from shardwright.testing.meshes import rank_mesh
from tests.fuzz.placing import placements_of
from tests.tiers import only

from .models import (
    check_full_gradients,
    check_pending,
    one_device_gradients,
    part_of,
    sum_loss,
    token_batch,
    tricky,
)
from .naive import swap_class


def _compiled(model, backend):
    warnings.simplefilter("ignore")  # torch's own, while it traces
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=backend)


def _trains(backend):
    axes = ("dp",)
    world = dist.get_world_size()
    plain = tricky()
    batch = token_batch(2 * world)
    wanted = one_device_gradients(plain, batch)
    expected = plain(batch[0])
    model = parallelize_replicate(plain, rank_mesh((2,), axes))
    tokens, targets = part_of(batch, [2] * world, dist.get_rank())
    compiled = _compiled(model, backend)
    for scale in (1, 2):
        sum_loss(compiled, (tokens, targets), batch[0].numel()).backward()
        check_pending(model, axes)
        check_full_gradients(model, wanted, scale)
    rank = dist.get_rank()
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens), expected[2 * rank : 2 * rank + 2])
    model.eval()
    out = compiled(tokens)
    assert out.requires_grad
    torch.testing.assert_close(out, expected[2 * rank : 2 * rank + 2])
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens), expected[2 * rank : 2 * rank + 2])


@pytest.mark.parametrize("backend", only(["aot_eager"], ["eager", "aot_eager"]))
def test_a_replicated_module_compiles_into_one_graph(ranks, backend):
    ranks(2, _trains, backend, timeout=170)


def _by_inductor():
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.GELU(), torch.nn.Linear(6, 3))
    x = torch.randn(6, 4)
    one = copy.deepcopy(plain)
    one(x).square().sum().backward()
    model = parallelize_replicate(plain, rank_mesh((2,), ("dp",)))
    compiled = _compiled(model, "inductor")
    mine = x.split((3, 3))[dist.get_rank()]
    compiled(mine).square().sum().backward()
    check_pending(model, ("dp",))
    check_full_gradients(model, {n: p.grad for n, p in one.named_parameters()})
    with torch.no_grad():
        torch.testing.assert_close(compiled.eval()(mine), one(mine))


@pytest.mark.slow
def test_inductors_code_computes_the_same(ranks):
    ranks(2, _by_inductor, timeout=170)


PROGRAMS = {
    "scores": lambda x: torch.nn.functional.gelu(x.softmax(-1) @ x.t()).sum(),
    "scaled scores": lambda x: torch.nn.functional.gelu((x * 2).softmax(-1) @ x.t()).sum(),
}


def _of_what_arrived(program):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    one = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(PROGRAMS[program](one), one)
    cut = sw.distribute_tensor(x, rank_mesh((2,), ("tp",)), [sw.Shard(1)]).requires_grad_()
    (gradient,) = torch.autograd.grad(_compiled(PROGRAMS[program], "inductor")(cut), cut)
    torch.testing.assert_close(gradient.full_tensor(), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_inductors_code_reads_what_was_sent_once_it_is_there(ranks, program):
    """Its C++ kernels of several sizes are one, which read before the wait: a gradient of what lay there."""
    ranks(2, _of_what_arrived, program, timeout=170)


def _beside_its_base(x):
    base = x * 2
    part = base[:, 1:]
    return base, part, part.flatten(1, 1)


def _written(x):
    base = x * 2
    part = base[1:]
    part.flatten(1, 1).mul_(3)
    return base, part, part.flatten(1, 1)[:, 2:]


def _returned_views():
    mesh = rank_mesh((2,), ("tp",))
    for function, dim in ((_beside_its_base, 0), (_written, 1)):
        x = torch.arange(20.0).reshape(4, 5).requires_grad_()
        cut = sw.distribute_tensor(x.detach(), mesh, [sw.Shard(dim)]).requires_grad_()
        wanted, got = function(x), _compiled(function, "aot_eager")(cut)
        for one, other in zip(wanted, got, strict=True):
            torch.testing.assert_close(other.full_tensor(), one)
            assert other.storage_offset() == one.storage_offset()
        for results in (wanted, got):
            sum(result.square().sum() for result in results).backward()
        torch.testing.assert_close(cut.grad.full_tensor(), x.grad)


def test_views_that_a_graph_returns_begin_where_they_do_on_one_device(ranks):
    """Those that are returned twice are taken of their base anew: they had its first elements."""
    ranks(2, _returned_views, timeout=120)


def _shared_arguments():
    x = torch.arange(24.0).reshape(4, 6)
    cut = sw.distribute_tensor(x, rank_mesh((2,), ("tp",)), [sw.Shard(0)])
    function = lambda a, b: (a.add_(1), b * 2)  # noqa: E731 - the same for both
    compiled = _compiled(function, "aot_eager")
    for other in (slice(3, 6), slice(2, 5), slice(3, 6)):
        wanted, got = function(x[:, :3], x[:, other]), compiled(cut[:, :3], cut[:, other])
        for one, two in zip([x, *wanted], [cut, *got], strict=True):
            torch.testing.assert_close(two.full_tensor(), one)


def test_a_write_into_what_another_argument_has_is_seen_there(ranks):
    """A graph would read the other one as it had been before: what Dynamo has read runs as it is."""
    ranks(2, _shared_arguments, timeout=120)


def _of_no_elements():
    mesh = rank_mesh((2,), ("tp",))
    functions = [
        *(partial(torch.linalg.matrix_norm, ord=order) for order in (1, 2, float("inf"))),
        torch.linalg.matrix_rank,
        torch.linalg.cond,
    ]
    for function, shape in product(functions, [(0, 0), (2, 0, 0)]):
        empty = torch.zeros(shape)
        got = _compiled(function, "aot_eager")(sw.distribute_tensor(empty, mesh, [sw.Replicate()]))
        assert isinstance(got, sw.DTensor)
        torch.testing.assert_close(got.full_tensor(), function(empty))


def test_what_torch_makes_of_no_elements_is_distributed(ranks):
    """It had been a plain tensor, since no op of a DTensor gave it."""
    ranks(2, _of_no_elements, timeout=120)


def _naive():
    model = swap_class(tricky(), rank_mesh((2,), ("dp",)))
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever the tracer says
        _compiled(model, "eager")(token_batch(1)[0])
    return type(caught.value).__module__


def test_swapped_classes_do_not(ranks):
    ranks(2, _naive, timeout=120)


def _two_uses():
    """One function, parameters that are pending on other axes: each use has its own program."""
    mesh = rank_mesh((2, 2), ("a", "b"))
    function = _compiled(torch.nn.functional.linear, "aot_eager")
    x = torch.ones(3, 4)
    for axes in (("a",), ("b",), ("a", "b")):
        layer = parallelize_replicate(torch.nn.Linear(4, 2), mesh[axes])
        function(x, layer.weight, layer.bias).sum().backward()
        layout = sw.layout_of(layer.weight.grad)
        assert layout.axes == axes
        assert all(p == sw.Partial("sum") for p in layout.placements)
        assert (layer.weight.grad.full_tensor() == 3 * 2 ** len(axes)).all()


def test_a_compiled_function_tells_uses_on_other_axes_apart(ranks):
    ranks(4, _two_uses, timeout=120)


BESIDE = {
    "embedding": torch.nn.functional.embedding,
    "of a list": lambda x, weight: torch.cat([x[:, None].expand(-1, 3) * 1.0, weight]),
    "made inside": lambda x, weight: weight + torch.arange(3.0),
}


def _beside():
    """Rows of each rank's own: their graph took them for the whole, and joined results of both."""
    mesh = rank_mesh((2,), ("tp",))
    weight = sw.distribute_tensor(torch.ones(8, 3), mesh, [sw.Shard(0)])
    rows = torch.arange(4) + dist.get_rank()
    for function in BESIDE.values():
        compiled = _compiled(function, "aot_eager")
        with pytest.raises(RuntimeError, match="beside a DTensor: where does it live"):
            compiled(rows, weight)


def test_a_plain_tensor_beside_a_distributed_one_is_refused_in_a_graph_too(ranks):
    ranks(2, _beside, timeout=120)


def _taken_beside():
    """What eager takes: labels of a loss that says so, and lists whose tensors are met one by one."""
    mesh = rank_mesh((2,), ("tp",))
    logits, labels = torch.linspace(-1, 1, 40).reshape(4, 10), torch.tensor([1, 0, 9, 5])
    cut = sw.distribute_tensor(logits, mesh, [sw.Shard(1)])
    with loss_parallel():
        loss = _compiled(torch.nn.functional.cross_entropy, "aot_eager")(cut, labels)
    torch.testing.assert_close(loss.full_tensor(), torch.nn.functional.cross_entropy(logits, labels))
    several = [cut, torch.ones(3) + dist.get_rank()]
    made = _compiled(torch._foreach_add, "aot_eager")(several, 1.0)
    torch.testing.assert_close(made[0].full_tensor(), logits + 1)
    torch.testing.assert_close(made[1], several[1] + 1)
    scale = torch.tensor(0.5, requires_grad=True)
    _compiled(lambda x, scale: (x * scale).square().sum(), "aot_eager")(cut, scale).backward()
    torch.testing.assert_close(scale.grad, logits.square().sum())  # a plain one


def test_plain_tensors_that_say_how_they_are_meant_are_taken_in_a_graph(ranks):
    ranks(2, _taken_beside, timeout=120)


def _branch():
    torch.manual_seed(0)
    layers = {"norm": torch.nn.LayerNorm(8), "up": torch.nn.Linear(8, 16), "down": torch.nn.Linear(16, 8)}
    return torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Sequential(OrderedDict(layers)))


def _cut_between_blocks():
    """Tokens that the ranks divide, and such that they do not."""
    mesh = rank_mesh((2,), ("tp",))
    plain = _branch()
    plan = {"1.up": "colwise", "1.down": "rowwise"}
    model = parallelize_tensor(_branch(), mesh, plan, sequence_parallel=True)
    compiled = _compiled(model, "aot_eager")
    for count in (6, 5):
        tokens = torch.arange(2 * count).reshape(2, count) % 11
        for module in (plain, model):
            module.zero_grad()
        wanted = plain(tokens)
        wanted.square().sum().backward()
        out = compiled(sw.distribute_tensor(tokens, mesh, [sw.Replicate()]))
        torch.testing.assert_close(out.full_tensor(), wanted)
        out.square().sum().backward()
        check_full_gradients(model, {name: p.grad for name, p in plain.named_parameters()})


@pytest.mark.slow
def test_a_model_whose_sequence_is_cut_between_blocks_is_one_graph(ranks):
    ranks(2, _cut_between_blocks, timeout=120)


def _complex_rows():
    """A rank is sent two rows, the later one first, and adds a gradient to what it was sent."""
    mesh = rank_mesh((2,), ("dp",))
    draw = torch.Generator().manual_seed(0)
    x, grad = torch.randn(2, 5, 2, dtype=torch.complex128, generator=draw)
    index = torch.randint(2, (5, 2), generator=draw)

    def program(x, index):
        return torch.take_along_dim(x, index, 1), torch.fft.ifftn(x)

    def trained(program, x, index, grad):
        x = x.clone().requires_grad_()
        torch.autograd.backward(program(x, index)[1], grad)
        return x.grad

    placed = [sw.distribute_tensor(t, mesh, [sw.Replicate()]) for t in (x, grad)]
    rows = sw.distribute_tensor(index, mesh, placements_of(["PermutedRows(2)"], mesh))
    got = trained(_compiled(program, "inductor"), placed[0], rows, placed[1])
    torch.testing.assert_close(got.full_tensor(), trained(program, x, index, grad))


@pytest.mark.slow
def test_rows_of_complex_numbers_are_all_written_by_inductor(ranks):
    ranks(2, _complex_rows, timeout=120)

"""Views in compiled functions that a graph returns: writes through them reach what they are views of."""

import warnings

import pytest
import torch
from torch._dynamo import disable, graph_break

import shardwright as sw
from shardwright.testing.meshes import rank_mesh
from tests.tiers import only


@disable
def _doubled(x):
    x.mul_(2)


def _after_a_break(x):
    v = x[1:]
    v.add_(1)
    graph_break()
    v.mul_(2)
    return x, v


def _of_the_base(x):
    v = x[1:]
    v.add_(1)
    graph_break()
    x.mul_(2)
    return v * 1, x


def _many_breaks(x):
    v = x[1:]
    w = v.t()
    v.add_(1)
    graph_break()
    w.mul_(2)
    graph_break()
    x.add_(3)
    graph_break()
    v.sub_(w.sum())
    return x, v, w


def _detached(x):
    v = x.detach()[1:]
    v.add_(1)
    graph_break()
    v.mul_(2)
    return x


def _several(x):
    x.add_(1)
    _, part = x.split(3)
    graph_break()
    part.data.mul_(2)
    return x


def _eager_code_writes(x):
    v = x.view(-1)[3:]
    y = v + 1
    _doubled(v)
    return x, y, v


def _of_a_result(x):
    y = x * 2
    v, w = y[1:], y.t()
    graph_break()
    v.mul_(2)
    graph_break()
    w.add_(1)
    return y, v


def _windows(x):
    v = x.unfold(0, 3, 1)
    x.add_(1)
    graph_break()
    x.mul_(2)
    return v * 1, x


def _two_views(x):
    a, b = x[1:], x[:, 1:]
    a.add_(1)
    graph_break()
    b.mul_(2)
    graph_break()
    a.sub_(3)
    return x, a, b


def _read_alone(x):
    y = x + 1
    x.mul_(2)
    return y


def _read_after(x):
    x.mul_(2)
    return x.square()


def _as_it_lies(x):
    v = x.redistribute(placements=x.placements) if isinstance(x, sw.DTensor) else x.view_as(x)
    x.add_(1)
    graph_break()
    if not v.requires_grad:
        v.mul_(2)
    return x


def _local_part(x):
    x.add_(1)
    v = x.to_local() if isinstance(x, sw.DTensor) else x.view_as(x)
    graph_break()
    if not v.requires_grad:
        v.mul_(2)
    return x


_PROGRAMS = {
    function.__name__.strip("_"): function
    for function in (
        _after_a_break, _of_the_base, _many_breaks, _detached, _several, _eager_code_writes, _of_a_result,
        _windows, _two_views, _read_alone, _read_after, _as_it_lies, _local_part,
    )
}  # fmt: skip
_OFTEN = ["after_a_break", "detached", "of_a_result", "windows", "read_alone", "local_part"]
_NO_GRADIENTS_THERE = {"several"}  # torch's error about one of several views, on one device too


def _run(program, given, mode):
    leaf = given.requires_grad_(mode is torch.enable_grad)
    with mode():
        x = leaf * 1
        results = program(x)
    results = results if isinstance(results, tuple) else (results,)
    if mode is torch.enable_grad:
        sum(result.square().sum() for result in results if result.requires_grad).backward()
        return [*results, x, leaf.grad]
    return [*results, x]


def _like_one_device(name, placements, backend="aot_eager", sizes=(6,)):
    warnings.simplefilter("ignore")  # torch's own, while it traces
    mesh = rank_mesh((2,), ("tp",))
    program = _PROGRAMS[name]
    for placement in placements:
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            torch._dynamo.reset()
            if name in _NO_GRADIENTS_THERE and mode is torch.enable_grad:
                continue
            compiled = torch.compile(program, backend=backend)
            for n in sizes:
                whole = torch.arange(4.0 * n).reshape(n, 4)
                cut = sw.distribute_tensor(whole, mesh, [placement])
                wanted = _run(program, whole.clone(), mode)
                for one, two in zip(wanted, _run(compiled, cut, mode), strict=True):
                    assert isinstance(two, sw.DTensor)
                    torch.testing.assert_close(two.full_tensor(), one, msg=f"{placement} {mode}")
    torch._dynamo.reset()


_ROWS, _OTHERS = [sw.Shard(0)], [sw.Shard(1), sw.Replicate()]


@pytest.mark.parametrize("placements", [_ROWS, pytest.param(_OTHERS, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", only(_OFTEN, _PROGRAMS))
def test_a_write_reaches_all_that_share_memory(ranks, name, placements):
    """The graph gave a copy where it wrote the argument; gradients saw no write through a view."""
    ranks(2, _like_one_device, name, placements, timeout=170)


@pytest.mark.slow
def test_so_it_does_in_inductors_code(ranks):
    ranks(2, _like_one_device, "many_breaks", _ROWS, "inductor", timeout=170)


@pytest.mark.parametrize("name", ["after_a_break", pytest.param("local_part", marks=pytest.mark.slow)])
def test_so_it_does_in_a_graph_of_any_size(ranks, name):
    """Symbols name no steps: the view is taken by its strides."""
    ranks(2, _like_one_device, name, _ROWS, "aot_eager", (6, 8, 7), timeout=170)

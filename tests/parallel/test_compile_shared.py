"""Compiled functions of tensors that share memory without autograd's knowledge: detached, brought, local."""

import warnings

import pytest
import torch
from torch._dynamo import graph_break

import shardwright as sw
from shardwright.testing.meshes import rank_mesh
from tests.tiers import only


def _brought(x):
    return x.redistribute(placements=x.placements) if isinstance(x, sw.DTensor) else x.view_as(x)


def _local(x):
    return x.to_local() if isinstance(x, sw.DTensor) else x.view_as(x)


_SEEN = {
    "itself": lambda x: x,
    "brought": _brought,
    "brought twice": lambda x: _brought(_brought(x)),
    "detached": lambda x: x.detach(),
    "data": lambda x: x.data,
    "local": _local,
    "rows of a detached one": lambda x: x.detach()[1:],
}
_OFTEN = ["detached", "local"]


def _write_first(x, seen):
    x.mul_(2)
    return x * 1, seen * 1


def _write_seen(x, seen):
    seen.mul_(2)
    return x * 1, seen * 1


def _read_and_write(x, seen):
    before = x * 3
    seen.add_(1)
    x.mul_(2)
    return before, seen * 1


def _two_graphs(see, program):
    def run(x):
        seen = see(x)
        graph_break()
        return program(x, seen)

    return run


def _one_graph(see, program):
    return lambda x: program(x, see(x))


def _values(results, mesh, mode):
    """Of results and of the gradient of all of them; a local part is one of rows."""
    whole = [
        x if mesh is None or isinstance(x, sw.DTensor) else sw.DTensor.from_local(x, mesh, [sw.Shard(0)])
        for x in results
    ]
    if mode is torch.enable_grad:
        sum(x.square().sum() for x in whole if x.requires_grad).backward()
    return [x.full_tensor() if isinstance(x, sw.DTensor) else x for x in whole]


def _run(call, mesh, mode):
    rows = torch.arange(24.0).reshape(6, 4)
    leaf = rows if mesh is None else sw.distribute_tensor(rows, mesh, [sw.Shard(0)])
    leaf.requires_grad_(mode is torch.enable_grad)
    with mode():
        x = leaf * 1
        results = call(x)
    values = _values(results, mesh, mode)
    after = [x if leaf.grad is None else leaf.grad, x.detach()]
    return values + [x.full_tensor() if isinstance(x, sw.DTensor) else x for x in after]


def _like_one_device(name, backend):
    warnings.simplefilter("ignore")  # torch's own, while it traces
    mesh, see = rank_mesh((2,), ("tp",)), _SEEN[name]
    modes = [torch.no_grad] if name == "local" else [torch.no_grad, torch.enable_grad]
    for program in (_write_first, _write_seen, _read_and_write):
        for mode in modes:
            torch._dynamo.reset()
            compiled = torch.compile(program, backend=backend)
            calls = [lambda x, call=compiled: call(x, see(x))]
            calls += [torch.compile(way(see, program), backend=backend) for way in (_two_graphs, _one_graph)]
            if program is _read_and_write and name == "local":
                del calls[:2]  # torch cannot trace a write into a part beside one into the tensor it is of
            for n, call in enumerate(calls):
                wanted = _run(_one_graph(see, program), None, mode)
                for one, two in zip(wanted, _run(call, mesh, mode), strict=True):
                    torch.testing.assert_close(two, one, msg=f"{program} {mode} {n}")
    torch._dynamo.reset()


@pytest.mark.parametrize("name", only(_OFTEN, _SEEN))
def test_a_write_is_read_wherever_the_memory_is_seen(ranks, name):
    """A graph computed with what another argument of the same memory held before, and gradients too."""
    ranks(2, _like_one_device, name, "aot_eager", timeout=170)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_so_it_is_with_other_backends(ranks, backend):
    ranks(2, _like_one_device, "brought", backend, timeout=170)


def _refused():
    """As without a graph: autograd could not tell the gradient of a local part what was written."""
    warnings.simplefilter("ignore")
    mesh = rank_mesh((2,), ("tp",))
    for way in (_two_graphs, _one_graph):
        torch._dynamo.reset()
        call = torch.compile(way(_local, _write_first), backend="aot_eager")
        with pytest.raises(RuntimeError, match="is a view and its base or another view"):
            _run(call, mesh, torch.enable_grad)
    torch._dynamo.reset()


def test_no_gradient_is_given_of_a_local_part_that_was_written(ranks):
    """It was that of what the part held before."""
    ranks(2, _refused, timeout=120)

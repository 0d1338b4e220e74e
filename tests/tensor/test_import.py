"""What the first use of the library imports, and that the compiler is told of our functions all the same."""

from pathlib import Path

import pytest
import torch

import shardwright
from shardwright.compat import TorchDispatchMode, without_modes
from tests.programs import Program
from tests.tiers import only

SOURCE = Path(shardwright.__file__).parents[1]
COSTLY = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.onnx",
)

FIRST = ("import torch._dynamo", "import shardwright", "import shardwright as sw; sw.DTensor")


FIRST_USE = f"""
import sys, torch, torch.distributed as dist, torch.distributed.tensor
before = set(sys.modules)
import shardwright as sw
sw.DTensor, sw.distribute_tensor
new = set(sys.modules) - before
print(*[name for name in {COSTLY!r} if name in new])

from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
x = sw.distribute_tensor(torch.ones(8, 8), mesh, [sw.Shard(0), sw.Shard(1)])
before = set(sys.modules)
x.redistribute(mesh, [sw.Replicate(), sw.Shard(0)]), x.sum(0).full_tensor()
x[2:6], x @ x, torch.softmax(x, 1)
new = set(sys.modules) - before
print(*[name for name in ("numpy.ma", "torch._dynamo", "torch._inductor") if name in new])
"""


def printed(program: str) -> list[str]:
    """The lines that a new process prints."""
    ended = Program(program, environment={"PYTHONPATH": str(SOURCE)}).end()
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


@pytest.fixture(scope="module")
def imported() -> list[str]:
    """What one new process imports at the first use, and then at the first calls."""
    return printed(FIRST_USE)


@pytest.mark.processes
def test_distributed_tensors_import_nothing_that_few_programs_need(imported):
    assert imported[0] == ""


@pytest.mark.processes
def test_first_calls_import_nothing_that_takes_long(imported):
    """What a first call imports it waits for: NumPy's masked arrays 15 ms, Dynamo a second."""
    assert imported[1] == ""


@pytest.mark.processes
@pytest.mark.parametrize("first", only(["import torch._dynamo"], FIRST))
def test_a_graph_holds_from_local_as_one_call_whoever_is_imported_first(first):
    """Dynamo is imported by `torch.compile`, or by somebody else before; it is told of us either way."""
    program = f"""
{first}
import torch, torch.distributed as dist
import shardwright as sw
from torch.testing._internal.distributed.fake_pg import FakeStore
sw.DTensor
dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
mesh = sw.init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
calls = []
def backend(graph, inputs):
    calls.extend(node.target.__name__ for node in graph.graph.nodes if node.op == "call_function")
    return graph.forward
torch.compile(lambda x: sw.DTensor.from_local(x, mesh, [sw.Shard(0)]) + 1, backend=backend, fullgraph=True)(
    torch.ones(2)
)
print(*calls)
"""
    assert printed(program) == ["from_local_in_graph add"]


def _graphs_of_a_mode():
    """How many graphs a program with a mode has, and whether what the mode calls is in one."""

    def below(x):
        return x.cosh()

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            with without_modes():
                below(torch.ones(2))
            return func(*args, **(kwargs or {}))

    graphs = []

    def backend(graph, inputs):
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph.forward

    def program(x):
        torch._dynamo.graph_break()
        with Mode():
            return x + 1

    torch.compile(lambda x: program(x * 2), backend=backend)(torch.ones(2))
    return len(graphs), any("cosh" in names for names in graphs)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_nothing_that_a_mode_runs_is_compiled(ranks):
    """Dynamo would compile, as a frame of its own, a function that a mode calls within a compiled program."""
    assert ranks(1, _graphs_of_a_mode, fresh=True) == [(1, False)]

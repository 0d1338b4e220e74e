"""What the first use of the library imports, and that the compiler is told of our functions all the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardwright

SOURCE = Path(shardwright.__file__).parents[1]
COSTLY = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.onnx",
)


def printed(program: str) -> list[str]:
    """What a new process prints."""
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return found.stdout.split()


@pytest.mark.processes
def test_distributed_tensors_import_nothing_that_few_programs_need():
    program = f"""
import sys, torch, torch.distributed.tensor
before = set(sys.modules)
import shardwright as sw
sw.DTensor, sw.distribute_tensor
new = set(sys.modules) - before
print(*[name for name in {COSTLY!r} if name in new])
"""
    assert printed(program) == []


@pytest.mark.processes
@pytest.mark.parametrize(
    "first", ["import torch._dynamo", "import shardwright", "import shardwright as sw; sw.DTensor"]
)
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
    assert printed(program) == ["from_local_in_graph", "add"]

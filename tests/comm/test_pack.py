"""Parts of a flat memory, as graphs read them."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from shardwright.comm.pack import part_of
from shardwright.index.overlap import Strided

_MEMORY = torch.arange(24)


def _traced(view):
    return make_fx(lambda x: part_of(x, view), tracing_mode="fake")(_MEMORY)


@pytest.mark.parametrize(
    "view",
    [
        Strided((), (), 5),
        Strided((4,), (1,), 3),
        Strided((4,), (3,), 2),
        Strided((2, 3), (8, 1), 6),
        Strided((3, 2), (1, 9), 4),
        Strided((0,), (1,), 2),
    ],
    ids=str,
)
def test_a_part_is_the_strided_view_of_it(view):
    wanted = _MEMORY.as_strided(view.size, view.stride, view.start)
    assert torch.equal(_traced(view)(_MEMORY), wanted)


def test_a_run_is_read_by_no_windows():
    """Inductor loses a write that reads complex numbers by windows of one element."""
    ops = [node.target for node in _traced(Strided((4,), (1,), 3)).graph.nodes if node.op == "call_function"]
    assert torch.ops.aten.slice.Tensor in ops
    assert torch.ops.aten.unfold.default not in ops

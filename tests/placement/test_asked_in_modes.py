"""A class may find its indices with torch: modes and the default device of the program are off there."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

from shardwright.errors import PlacementError
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import MeshShape
from shardwright.placement import Box, Partition, Region
from shardwright.remember import forget
from shardwright.rules import TensorInfo, propagate
from shardwright.rules.call import Call
from shardwright.testing import rank_mesh
from shardwright.testing.check_placement import check_placement

PAIR = MeshShape(("tp",), (2,))
SHAPE = (6, 5)


class Drawn:
    """Rows in an order that torch draws; a mixin that knows of no placement."""

    def region(self, shape, n, coord):
        order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(self.seed))
        mine = order[coord::n].tolist()
        boxes = [Box((row, *[0] * (len(shape) - 1)), (1, *shape[1:])) for row in mine]
        return Region(boxes, (len(mine), *shape[1:]))


@dataclass(frozen=True)
class DrawnRows(Drawn, Partition):
    seed: int

    def validate(self, shape, n):
        if not shape or not bool(torch.tensor(shape[0]) >= 0):
            raise PlacementError("DrawnRows needs rows")

    @classmethod
    def names(cls, held, length, n):
        for seed in torch.arange(8).tolist():
            yield cls(seed)


class Refuses(TorchFunctionMode):
    """Of the program: it takes no function of torch."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} reached the mode")


@contextmanager
def _default_device():
    before = torch.get_default_device()
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(before if before.type != "cpu" else None)


MODES = {
    "fake": FakeTensorMode,
    "meta": lambda: torch.device("meta"),
    "default": _default_device,
    "function": Refuses,
    "inference": torch.inference_mode,
}


@pytest.fixture(autouse=True)
def _derived_anew():
    forget()


@pytest.mark.parametrize("mode", MODES)
def test_regions_are_the_same_under_every_mode(mode):
    placement = DrawnRows(3)
    wanted = [placement.region(SHAPE, 2, coord) for coord in range(2)]
    forget()
    with MODES[mode]():
        layout = Layout(PAIR, [placement], SHAPE, dtype=torch.float32)
        assert [layout.region((coord,)) for coord in range(2)] == wanted
        assert list(DrawnRows.names(lambda coord: (), 4, 2)) == [DrawnRows(seed) for seed in range(8)]


def test_rules_ask_for_them_under_a_mode():
    with FakeTensorMode():
        layout = Layout(PAIR, [DrawnRows(4)], SHAPE, dtype=torch.float32)
        info = TensorInfo(layout.shape, layout.stride, layout.dtype)
        made = TensorInfo((5, 6), (1, 5), torch.float32)
        call = Call(torch.ops.aten.t.default, (info,), (), (made,))
        decision = propagate(call, [layout])
    assert decision.inputs == (layout,)
    assert decision.outputs[0].placements[0].cut_dims((5, 6), 2) == (1,)


def test_its_methods_keep_their_names():
    assert DrawnRows.validate.__qualname__ == "DrawnRows.validate"
    check_placement(DrawnRows(5), axis_sizes=(1, 2))


def _placed():
    import shardwright as sw

    mesh = rank_mesh((2,), ("tp",))
    x = torch.arange(45.0).view(9, 5)
    with torch.device("meta"):
        placed = sw.distribute_tensor(x, mesh, [DrawnRows(7)])
    assert torch.equal(placed.full_tensor(), x)


def test_a_tensor_is_placed_under_a_default_device(ranks):
    ranks(2, _placed)

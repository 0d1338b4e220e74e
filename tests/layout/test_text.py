"""The text of a layout, and the tensor's view of it."""

from __future__ import annotations

import pickle

import pytest
import torch

from shardwright.errors import LayoutError, MeshError
from shardwright.layout import Layout, MeshShape, from_partition_spec, to_partition_spec
from shardwright.layout.text import parse_placement
from shardwright.placement import Interleaved, Owner, Partial, Ragged, Replicate, Shard, ZigZag
from tests.placement.user_placements import Band, Checkerboard, PermutedRows

MESH = MeshShape(("dp", "cp", "tp"), (2, 2, 2))


def layout(placements, shape=(8, 16), **kwargs):
    return Layout(MESH, placements, shape, dtype=kwargs.pop("dtype", torch.float32), **kwargs)


TEXTS = [
    ({"dp": Shard(0), "tp": Shard(1)}, {}, "f32[8@dp, 16@tp]"),
    (
        {"dp": Shard(0), "tp": Shard(0), "cp": Partial()}, {"order": ("tp", "dp")},
        "f32[8@(tp, dp), 16] {cp: Partial(sum)}",
    ),
    ({"dp": Shard(0), "tp": Shard(0)}, {}, "f32[8@(dp, tp), 16]"),
    ({}, {"dtype": torch.bfloat16}, "bf16[8, 16]"),
    ({}, {"shape": (), "dtype": torch.int64}, "i64[]"),
    ({"dp": Shard(0)}, {"shape": (0,), "dtype": torch.bool}, "bool[0@dp]"),
    ({"dp": Interleaved(0, 2), "tp": Shard(0)}, {}, "f32[8@tp, 16] {dp: Interleaved(0, 2)}"),
    (
        {"dp": Interleaved(0, 2), "tp": Shard(0)}, {"order": ("tp", "dp")},
        "f32[8@tp, 16] {dp: Interleaved(0, 2)} order(tp, dp)",
    ),
    (
        {"cp": Ragged((1, 2), (0, 1)), "tp": Owner(1)}, {},
        "f32[8, 16] {cp: Ragged((1, 2), (0, 1)), tp: Owner(1)}",
    ),
    (
        {"cp": ZigZag(1)}, {"stride": (1, 8), "dtype": torch.complex64},
        "c64[8, 16] {cp: ZigZag(1)} stride(1, 8)",
    ),
    ({"dp": Partial("max"), "cp": Partial("sum")}, {}, "f32[8, 16] {dp: Partial(max), cp: Partial(sum)}"),
]  # fmt: skip


@pytest.mark.parametrize(("placements", "kwargs", "text"), TEXTS)
def test_text_is_written_and_read(placements, kwargs, text):
    made = layout(placements, **kwargs)
    assert str(made) == text
    assert Layout.parse(text, MESH) == made


def test_text_may_be_written_by_hand():
    assert Layout.parse(" f32[ 8@dp,16 ]{cp:Partial('sum')} ", MESH) == layout(
        {"dp": Shard(0), "cp": Partial()}
    )


@pytest.mark.parametrize(
    ("error", "message", "text"),
    [
        (LayoutError, "is not a layout's text", "f32 8, 16"),
        (LayoutError, "is not a size", "f32[8@, 16]"),
        (LayoutError, "'f33' is not a dtype", "f33[8]"),
        (MeshError, "names the axis 'pp'", "f32[8@pp]"),
        (LayoutError, "places axis dp twice", "f32[8@dp, 16@dp]"),
        (LayoutError, "places axis dp twice", "f32[8@dp] {dp: Owner(0)}"),
        (LayoutError, "no placement class is called 'Sharded'", "f32[8] {dp: Sharded(0)}"),
        (LayoutError, "is not a placement such as", "f32[8] {dp: Owner}"),
        (LayoutError, "is not a placement such as", "f32[8] {dp: Owner(open('x'))}"),
        (LayoutError, "is not 'axis: Placement", "f32[8] {Owner(0)}"),
        (LayoutError, r"too many positional arguments, of ZigZag\(dim\)", "f32[8] {dp: ZigZag(0, 1)}"),
        (LayoutError, r"unexpected keyword .*, of Shard\(dim\)", "f32[8] {dp: Shard(0, axis=1)}"),
        (LayoutError, r"missing a required argument: 'coord'", "f32[8] {dp: Owner()}"),
    ],
)
def test_text_that_says_no_layout_is_refused(error, message, text):
    with pytest.raises(error, match=message):
        Layout.parse(text, MESH)


def test_partition_spec_is_the_tensors_view():
    assert to_partition_spec(layout({"dp": Shard(0), "tp": Shard(1)})) == ("dp", "tp")
    both = layout({"dp": Shard(0), "tp": Shard(0)}, order=("tp", "dp"))
    assert to_partition_spec(both) == (("tp", "dp"), None)
    placements = from_partition_spec(MESH, (("tp", "dp"), None))
    assert placements == (Shard(0), Replicate(), Shard(0))
    assert placements.order == ("tp", "dp")
    assert layout(placements) == both
    assert layout(pickle.loads(pickle.dumps(placements))) == both
    assert layout(placements, order=("dp", "tp")) != both
    left_to_right = from_partition_spec(MESH, ("dp", None, ("cp", "tp")))
    assert left_to_right == (Shard(0), Shard(2), Shard(2))
    assert left_to_right.order is None
    assert from_partition_spec(MESH, ()) == (Replicate(),) * 3


def test_partition_spec_says_what_it_cannot_say():
    with pytest.raises(LayoutError, match=r"Interleaved\(0, 2\) on axis dp cannot be said"):
        to_partition_spec(layout({"dp": Interleaved(0, 2)}))
    with pytest.raises(LayoutError, match=r"Partial\(sum\) on axis cp cannot be said"):
        to_partition_spec(layout({"cp": Partial()}))
    with pytest.raises(LayoutError, match="names axis dp twice"):
        from_partition_spec(MESH, ("dp", "dp"))
    with pytest.raises(MeshError, match="no axis 'pp'"):
        from_partition_spec(MESH, ("pp",))


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product", "norm2", "band", "bor", "bxor"])
def test_every_reduction_parses_back(op):
    made = layout({"cp": Partial(op), "tp": Shard(1)})
    assert Layout.parse(str(made), MESH) == made


def test_a_users_placement_parses_back():
    for placement in (PermutedRows(7), Band(), Checkerboard(2)):
        made = layout({"cp": placement, "tp": Shard(1)})
        assert Layout.parse(str(made), MESH) == made


def test_a_name_that_two_classes_share_is_refused():
    both = [type("Twice", (Band,), {"__module__": module, "__qualname__": "Twice"}) for module in ("a", "b")]
    assert len(both) == 2
    with pytest.raises(LayoutError, match=r"'Twice' may be a\.Twice or b\.Twice: give them different names"):
        parse_placement("Twice()")

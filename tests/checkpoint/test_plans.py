"""A plan that is known again is the plan that would be made, and what it cannot know is still compared."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright import Replicate, Shard, distribute_tensor
from shardwright.checkpoint import load, plan, save
from shardwright.checkpoint.collector import no_collection
from shardwright.checkpoint.storage import proof, reader
from shardwright.checkpoint.storage.manifest import SavedTensor
from shardwright.errors import CheckpointError
from shardwright.index.region import Box
from shardwright.remember import forget
from shardwright.testing import rank_mesh

Ranks = Callable[..., list[Any]]


def model_of(*placements: Any) -> nn.Module:
    """A module whose parameters lie so on all ranks; each value is its index."""
    mesh = rank_mesh((dist.get_world_size(),), ("a",))
    model = nn.Module()
    for number, placement in enumerate(placements):
        whole = torch.arange(24.0).reshape(6, 4) + 100 * number
        model.register_parameter(f"p{number}", nn.Parameter(distribute_tensor(whole, mesh, [placement])))
    return model


def comes_back(path: Path, model: nn.Module) -> bool:
    """Whether what stands there is what the module holds, read by torch alone on the whole tensors."""
    other = model_of(*(Replicate() for _ in model.parameters()))
    with torch.no_grad():
        for one in other.parameters():
            one.zero_()
    load(path, other)
    pairs = zip(other.parameters(), model.parameters(), strict=True)
    return all(torch.equal(a.to_local(), b.full_tensor()) for a, b in pairs)


def saves_in_turn(path: Path) -> list[bool]:
    """Layouts change from save to save, and come back; one rank forgets what it knew."""
    found = []
    for turn, placements in enumerate([(Shard(0), Replicate())] * 2 + [(Shard(1), Shard(0))] * 2):
        model = model_of(*placements)
        with torch.no_grad():
            for one in model.parameters():
                one.add_(turn)
        if turn == 1 and dist.get_rank() == 0:
            forget()
        save(path, model)
        found.append(comes_back(path, model))
    return found


def gathers(path: Path) -> list[int]:
    """How many gathers each of three saves asks for, before the third a layout changes; and two loads.

    At the second load ranks have other values, which are none where all have the same.
    """
    counts, real = [0], dist.all_gather_object

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        return real(*args, **kwargs)

    dist.all_gather_object = counted
    forget()
    for model in (model_of(Shard(0)), model_of(Shard(0)), model_of(Shard(1))):
        save(path, model, apart=None)
        counts.append(0)
    for apart in ({}, {"apart": 0} if dist.get_rank() else {}):
        load(path, model, **apart)
        counts.append(0)
    dist.all_gather_object = real
    return counts[:-1]


def drifts(path: Path) -> str:
    """The second save finds copies that have drifted apart since the first one."""
    model = model_of(Replicate(), Shard(0))
    save(path, model)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.get_parameter("p0").detach().to_local()[0, 0] = 7
    try:
        save(path, model)
    except CheckpointError as error:
        return str(error)
    return "saved"


def planted(path: Path) -> str:
    """The same with a plan that forgets which boxes are copies."""
    real = plan.plan_of
    plan.plan_of = lambda *args: real(*args)._replace(copies=())
    forget()
    return drifts(path)


def test_layouts_may_change_between_saves(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, saves_in_turn, tmp_path / "c", fresh=True) == [[True] * 4] * 2


def test_a_known_plan_gathers_no_descriptions(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, gathers, tmp_path / "c", fresh=True) == [[4, 3, 4, 3, 4]] * 2


def test_copies_are_compared_where_the_plan_is_known(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(2, drifts, tmp_path / "c", fresh=True)
    assert found[0] == found[1]
    assert "model/p0 is laid out as" in found[0]
    assert "ranks 0 and 1 should hold the same elements" in found[0]


def test_a_planted_plan_without_copies_goes_red(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, planted, tmp_path / "c", fresh=True) == ["saved"] * 2


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_afterwards_as_it_was(on: bool) -> None:
    was = gc.isenabled()
    try:
        (gc.enable if on else gc.disable)()
        with no_collection(), no_collection():
            inside = gc.isenabled()
        assert not inside
        assert gc.isenabled() == on
    finally:
        (gc.enable if was else gc.disable)()


def test_a_plan_is_of_one_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a group that is made anew a process may have another rank, and then it writes other parts."""
    forget()
    save(tmp_path / "c", nn.Linear(2, 2))
    assert plan.tell({}, {}).known
    monkeypatch.setattr(plan, "rank", lambda: 1)
    assert not plan.tell({}, {}).known


class CountedPart(NamedTuple):
    """A saved part that counts who asks how large it is."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    asked: list[int]

    @property
    def size(self) -> tuple[int, ...]:
        self.asked[0] += 1
        return self.extent


def cut(shape: tuple[int, int], rows: int, columns: int) -> list[Box]:
    return [
        Box((row, column), (min(rows, shape[0] - row), min(columns, shape[1] - column)))
        for row in range(0, shape[0], rows)
        for column in range(0, shape[1], columns)
    ]


@pytest.mark.parametrize("rows", [300, 5])
@pytest.mark.parametrize(
    ("mine", "theirs"),
    [((1, 2), (1, 2)), ((1, 2), (2, 1)), ((3, 2), (1, 1)), ((300, 2), (1, 2)), ((1, 1), (300, 2))],
)
def test_each_element_is_read_once_of_the_parts_beside_a_box(
    rows: int, mine: tuple[int, int], theirs: tuple[int, int]
) -> None:
    """Each box had looked at every part: of a table whose rows lie cyclically, the square of its rows.

    A part may begin where a box does and be smaller, or larger: what is read lies in it.
    """
    shape, asked = (rows, 2), [0]
    parts = [CountedPart(box.offset, box.size, asked) for box in cut(shape, *theirs)]
    saved, whole = torch.arange(1.0, 1 + 2 * rows).reshape(shape), torch.zeros(shape)
    views = [(box, whole[box.slices]) for box in cut(shape, *mine)]
    tensor = SavedTensor.model_construct(dtype="float32", shape=shape, parts=parts)
    for want in reader.wants("x", tensor, views):
        held = saved[Box(want.part.offset, want.part.extent).slices]
        want.view.add_(held[Box(want.low, tuple(want.view.shape)).slices].reshape(want.view.shape))
    assert torch.equal(whole, saved)
    assert asked[0] <= 3 * len(parts) + 20 * len(views)


@pytest.mark.parametrize("cuts", [(2, 2), (6, 10), (6, 1), (60, 60)])
@pytest.mark.parametrize("harm", ["", "twice", "moved", "longer", "missing"])
def test_boxes_of_any_grid_are_proven_to_be_the_tensor(cuts: tuple[int, int], harm: str) -> None:
    """As marks of a whole tensor say; of many boxes a sweep compared each with all in its rows."""
    shape = (60, 60)
    boxes = [(box.offset, box.size) for box in cut(shape, *cuts)]
    (first, size), marks = boxes[len(boxes) // 2], torch.zeros(shape, dtype=torch.int8)
    if harm == "twice":
        boxes.append((first, size))
    elif harm == "moved":
        boxes[len(boxes) // 2] = (0, 0), size
    elif harm == "longer":
        boxes[0] = (0, 0), (min(60, cuts[0] + 1), cuts[1])
    elif harm == "missing":
        del boxes[len(boxes) // 2]
    for offset, extent in boxes:
        marks[Box(offset, extent).slices] += 1
    said = proof.why_not_once(shape, tuple(boxes))
    assert ("stored twice" in said) == bool((marks > 1).any()), said
    assert (not said) == bool((marks == 1).all()), said


def test_sizes_that_no_machine_counts_are_proven_too() -> None:
    """An index of torch's, which anybody may have written, may say what it likes."""
    boxes = tuple(((at << 70,), (1 << 70,)) for at in range(100))
    assert proof.why_not_once((100 << 70,), boxes) == ""
    assert "stored twice" in proof.why_not_once((200 << 70,), (*boxes, boxes[7]))


def test_boxes_in_a_grid_are_not_compared_in_pairs() -> None:
    met, boxes = [0], cut((120, 120), 2, 2)

    class Counted(tuple[int, ...]):
        __slots__ = ()

        def __getitem__(self, at: Any) -> Any:
            met[0] += 1
            return super().__getitem__(at)

    counted = tuple((Counted(box.offset), Counted(box.size)) for box in boxes)
    assert not proof.why_not_once((120, 120), counted)
    assert met[0] < 10 * len(boxes)

"""What one mesh saved, any mesh loads: bit for bit, the optimizer's state by name, or nothing at all."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest

from shardwright import Interleaved, Owner, Ragged, Shard
from tests.checkpoint.programs import Setup, load_it, load_then_draw, same, save_it, save_then_draw
from tests.tiers import one_in

Ranks = Callable[..., list[Any]]

LAYOUTS = {
    "replicated": Setup({"dp": 2}, {}),
    "sharded": Setup({"dp": 2}, {"embedding": {"dp": Shard(0)}, "experts": {"dp": Shard(1)}}),
    "two axes on one dim": Setup(
        {"dp": 2, "tp": 2}, {"embedding": {"dp": Shard(0), "tp": Shard(0)}, "experts": {"tp": Shard(2)}}
    ),
    "tp first, then dp": Setup(
        {"dp": 2, "tp": 2},
        {"embedding": {"dp": Shard(0), "tp": Shard(0)}, "experts": {"dp": Shard(0), "tp": Shard(0)}},
        order=("tp", "dp"),
    ),
    "several boxes": Setup(
        {"dp": 2, "ep": 2},
        {
            "embedding": {"dp": Interleaved(1, 3)},
            "experts": {"dp": Owner(1), "ep": Ragged((1, 2), dims=(0, 1))},
        },
    ),
    "more ranks than rows": Setup({"dp": 4}, {"experts": {"dp": Shard(1)}, "embedding": {"dp": Shard(1)}}),
}
WORLDS = {name: prod(setup.axes.values()) for name, setup in LAYOUTS.items()}
PAIRS = [(one, other) for one in LAYOUTS for other in LAYOUTS if one == other or "replicated" in (one, other)]
PAIRS += [("tp first, then dp", "two axes on one dim"), ("several boxes", "tp first, then dp")]
PAIRS += [("more ranks than rows", "sharded"), ("two axes on one dim", "several boxes")]


@pytest.mark.parametrize(("source", "target"), one_in(3, PAIRS))
def test_what_one_layout_saved_another_loads(ranks: Ranks, tmp_path: Path, source: str, target: str) -> None:
    saved = ranks(WORLDS[source], save_it, tmp_path / "c", LAYOUTS[source])
    loaded = ranks(WORLDS[target], load_it, tmp_path / "c", LAYOUTS[target])
    assert "embedding/exp_avg" in saved[0]
    for found, _later, (step, extra, rng_restored) in loaded:
        assert same(found, saved[0])
        assert (step, extra, rng_restored) == (3, {"note": "hello"}, WORLDS[source] == WORLDS[target])


def test_the_runs_go_on_alike_after_loading(ranks: Ranks, tmp_path: Path) -> None:
    """Counters and learning rates of each group came along, whatever the optimizer had before."""
    ranks(4, save_it, tmp_path / "c", LAYOUTS["tp first, then dp"])
    fresh = ranks(2, load_it, tmp_path / "c", LAYOUTS["sharded"])
    used = ranks(1, load_it, tmp_path / "c", None, 5)
    assert same(fresh[0][1], used[0][1])
    assert fresh[0][1]["embedding/step"] == 4


def test_a_plain_model_of_one_process_is_saved_and_loaded_without_a_process_group(tmp_path: Path) -> None:
    saved = save_it(tmp_path / "c", None)
    assert same(load_it(tmp_path / "c", None)[0], saved)


def test_generators_go_on_where_they_were_in_a_world_of_the_same_size(ranks: Ranks, tmp_path: Path) -> None:
    drawn = ranks(2, save_then_draw, tmp_path / "c")
    assert ranks(2, load_then_draw, tmp_path / "c") == drawn
    assert drawn[0] != drawn[1]
    assert ranks(1, load_then_draw, tmp_path / "c")[0] not in drawn

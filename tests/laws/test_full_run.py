"""The full run of the laws, made short: it counts what it checks, and goes red on a planted fault."""

from __future__ import annotations

import random

import pytest
import torch

from shardwright.placement import Interleaved, Partial, Shard
from tests.laws import draws
from tests.laws.__main__ import DEFAULTS, main
from tests.laws.draws import MESHES, SHAPES, Draw, kinds, name_of, tolerance, value
from tests.laws.laws import LAWS, BrokenLawError, Tally

SHIPPED = {
    "Replicate", "Shard", "Interleaved", "Ragged", "Ragged of several dims", "Owner", "ZigZag", "BlockCyclic",
    "Fused", "Flat", "Imaged", "Joint", "Moved", "Nested", "Sliced", "Spread", "Together",
    *(f"Partial({op})" for op in ("sum", "avg", "max", "min", "product", "norm2", "band", "bor", "bxor")),
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def checked(law, count):
    tally = Tally()
    checks = LAWS[law](random.Random(f"0 {law}"), tally)
    for _ in range(count):
        next(checks)
    return tally


def test_a_short_run_holds_and_counts_every_shipped_placement():
    tally = checked("round trips", 400)
    assert tally.cases["round trips"] == 400
    assert tally.cases["of these through a plan"] == 40
    # A layout calls the drawn `Moved` by the class that says the same of its dim.
    assert {name for _, name in tally.placements} == SHIPPED - {"Moved"}


@pytest.mark.parametrize("law", ["redistributions", "refused by name"])
def test_a_short_run_of_pairs_holds(law):
    tally = checked(law, 200)
    assert tally.cases[law] == 200
    assert law != "redistributions" or len(tally.pairs) > 100


def test_the_command_prints_what_it_checked(monkeypatch, capsys):
    counts = [f"--{law.replace(' ', '-')}=20" for law in DEFAULTS]
    monkeypatch.setattr("sys.argv", ["laws", "--lists=0", *counts])
    assert main() == 0
    printed = capsys.readouterr().out
    assert "20 round trips" in printed
    assert "20 redistributions" in " ".join(printed.split())


class HalfOfIt(Shard):
    """Planted: coord 0 gets zeros, so the first piece is lost."""

    def split(self, x, n, coord):
        mine = super().split(x, n, coord)
        return torch.zeros_like(mine) if coord == 0 else mine


class OffByOne(Interleaved):
    """Planted: the elements come in another order than the regions say."""

    def split(self, x, n, coord):
        return super().split(x, n, coord).roll(1)


@pytest.mark.parametrize("fault", [HalfOfIt(0), OffByOne(0, 2)], ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize("law", ["round trips", "redistributions"])
def test_a_planted_fault_goes_red(monkeypatch, fault, law):
    shipped = kinds
    # It would be refused where it is first met: what is tried here is whether the law sees it.
    monkeypatch.setattr("shardwright.layout.arrangement.check_steps", lambda *_: None)
    monkeypatch.setattr(
        "tests.laws.laws.kinds", lambda rng, x, n: [fault] * (x.dim() > 0) + shipped(rng, x, n)
    )
    with pytest.raises(BrokenLawError, match=r"(?s)the value is .*it must be|in place of"):
        checked(law, 200)


def test_the_draws_are_those_that_were_asked_for():
    assert [mesh.sizes for mesh in MESHES] == [(1,), (2,), (3,), (5,), (2, 2), (2, 3), (2, 2, 2)]
    sizes = {size for shape in SHAPES for size in shape}
    assert {0, 1, 2, 3, 5, 7, 13} <= sizes
    rng = random.Random(0)
    x = value(rng, (4, 6), torch.float32).abs()
    assert {name_of(p) for p in kinds(rng, x, 3)} == {n for n in SHIPPED if not n[8:].startswith("b")}
    drawn = Draw(MESHES[4], x)
    assert tolerance(drawn.layout([Partial("avg"), Shard(0)])) == 2
    assert draws.small(drawn)

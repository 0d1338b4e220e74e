"""A fixed sample of random programs, and the faults that they must find; `make fuzz` runs many more."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.fuzz.compiled import prepared
from tests.fuzz.draw import draw
from tests.fuzz.faults import FAULTS, check_with
from tests.fuzz.found import FOUND
from tests.fuzz.paste import source
from tests.fuzz.program import Leaf, Program, Ref, Step
from tests.fuzz.ranks import verdicts_of
from tests.fuzz.run import Plain, run
from tests.fuzz.shrink import shrink
from tests.fuzz.sweep import Worlds
from tests.fuzz.verdicts import OK, WRONG, worst
from tests.tiers import all_but, only

# A few programs of each mesh: the seeds are the first ones, no choice was made among them.
SAMPLE = {(2,): range(200), (3,): range(200, 260), (2, 2): range(260, 300)}
_LIMIT = 150.0  # seconds of a planted fault, which takes two; a machine that is shared may take long
_OFTEN = 10  # of each mesh, one in so many is tried by `make test`
PARTS = [(mesh, often) for often in (True, False) for mesh in SAMPLE]


@pytest.fixture
def worlds(rank_pool):
    with Worlds(pool=rank_pool) as made:
        yield made


@pytest.mark.timeout(900)  # 20 s; a machine that is shared may take long
@pytest.mark.parametrize(("mesh", "often"), all_but([part for part in PARTS if not part[1]], PARTS))
def test_a_sample_of_programs_does_what_one_device_does(worlds, mesh, often):
    programs = [draw(seed, mesh) for seed in SAMPLE[mesh] if (seed % _OFTEN == 0) == often]
    failed = [(p, v) for p, v in worlds.check(programs) if v.kind != OK]
    if failed:
        small = [shrink(*pair, worlds) for pair in failed[:3]]
        pytest.fail(f"{len(failed)} of {len(programs)}:\n" + "\n".join(source(*pair) for pair in small))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seeds", only([range(10)], [range(10), range(10, 200)]), ids=str)
def test_a_sample_of_replays_does_what_one_device_does(rank_pool, seeds):
    with Worlds(pool=rank_pool, erased=True) as worlds:
        found = worlds.check([draw(seed, (2,)) for seed in seeds])
    assert [(program.seed, v.text) for program, v in found if v.kind != OK] == []
    assert sum(v.replayed for _, v in found) >= len(seeds) / 4


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seeds", only([range(20, 32)], [range(20, 32), range(32, 200)]), ids=str)
def test_a_sample_of_programs_in_inference_mode_does_what_one_device_does(worlds, seeds):
    found = worlds.check([replace(draw(seed, (2,)), under="inference") for seed in seeds])
    assert [(program.seed, v.text) for program, v in found if v.kind != OK] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sample_of_compiled_programs_does_what_one_device_does(worlds):
    found = worlds.check([prepared(draw(seed, (2,)), "aot_eager") for seed in range(4, 12)])
    assert [(program.seed, v.text) for program, v in found if v.kind != OK] == []


@pytest.mark.parametrize("mesh", sorted({program.mesh for program in FOUND.values()}))
def test_programs_that_were_found_stay_right(worlds, mesh):
    found = {name: program for name, program in FOUND.items() if program.mesh == mesh}
    verdicts = [verdict for _, verdict in worlds.check(list(found.values()))]
    failed = {name: v.text for name, v in zip(found, verdicts, strict=True) if v.kind != OK}
    assert not failed


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(rank_pool, tmp_path, fault):
    """Wrong values, or an error that one device raises and we do not; without the fault, none of either."""
    families = dict.fromkeys(FAULTS[fault].families, 1.0)
    programs = [draw(seed, (2,), families, torch.float64) for seed in range(8, 16)]
    file = str(tmp_path / "found")
    rank_pool.run(2, check_with, fault, programs, file, fresh=True, timeout=_LIMIT)
    kinds = Counter(worst(verdicts).kind for verdicts in verdicts_of(file, 2))
    assert kinds[OK] < len(programs), kinds
    assert set(kinds) <= {OK, WRONG, "no error"}


def test_a_failure_becomes_a_small_program_to_paste(rank_pool, tmp_path):
    """Of eight steps one is at fault, and one placement."""
    x = Leaf("x1", (4, 6), "float64", ("Partial('min')",), "normal", 1)
    y = Leaf("x2", (4, 6), "float64", ("Shard(0)",), "normal", 2)
    steps = [
        Step(("v1",), "torch.sin", (Ref("x2"),)),
        Step(("v2",), ".t", (Ref("x1"),)),
        Step(("v3",), "torch.neg", (Ref("v2"),)),
        Step(("v4",), "torch.mm", (Ref("v1"), Ref("v3"))),
        Step(("v5",), "torch.sum", (Ref("v4"),)),
    ]
    program = Program((2,), (x, y), tuple(steps))

    class Planted:
        """Worlds that have the fault."""

        def check(self, programs):
            file = str(tmp_path / f"{id(programs)}{len(list(tmp_path.iterdir()))}")
            rank_pool.run(2, check_with, "swapped sign", programs, file, fresh=True, timeout=_LIMIT)
            return list(zip(programs, map(worst, verdicts_of(file, 2)), strict=True))

    ((_, verdict),) = Planted().check([program])
    assert verdict.kind == WRONG
    small, verdict = shrink(program, verdict, Planted())
    assert [step.call for step in small.steps] == ["torch.neg"]
    text = source(small, verdict)
    assert "v3 = torch.neg(x1)" in text
    compile(text, "pasted", "exec")


def test_what_is_drawn_runs_on_one_device_and_is_drawn_again_from_its_seed():
    for seed in range(20):
        program = draw(seed, (2, 2))
        assert program == draw(seed, (2, 2))
        out = run(program, Plain())
        assert out.error is None or out.step == len(program.steps) - 1

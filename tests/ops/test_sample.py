"""A stated sample of the operator database on real ranks; `make ops` runs all of it."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ops.__main__ import main
from tests.ops.cases import CRASH, ERROR, OK, WRONG, Case, Options, Record
from tests.ops.compare import difference
from tests.ops.database import operators
from tests.ops.excluded import EXCLUDED
from tests.ops.faults import check_planted
from tests.ops.sample import OF_NETWORKS, chosen
from tests.ops.sweep import sweep
from tests.ops.table import MOST_FALLBACKS, PAGE, Row, page, read, rows, stale
from tests.tiers import all_but
from tests.torch_samples import op_db

_PARTS = 10


def test_fewer_than_two_percent_of_the_operators_are_excluded_each_for_a_reason():
    assert set(EXCLUDED) <= {info.full_name for info in op_db}
    assert all(EXCLUDED.values())
    assert len(EXCLUDED) < 0.02 * len(op_db)


@pytest.mark.parametrize("part", all_but(range(1, _PARTS), range(_PARTS)))
def test_a_sample_of_operators_gives_the_single_device_answer(rank_pool, capsys, tmp_path, part):
    """Every placement on the inputs, one input of each dtype, forward and backward, two ranks.

    What ran under Shard(0) is what the page about operators says.
    """
    names, report = ",".join(chosen(operators())[part::_PARTS]), tmp_path / "report.jsonl"
    options = ["--samples", "1", "--mesh", "2", "--jobs", "1", "--report", str(report)]
    status = main(["--ops", names, *options], rank_pool)
    assert status == 0, capsys.readouterr().out
    records = [Record.from_dict(json.loads(line)) for line in report.read_text().splitlines()]
    text = PAGE.read_text()
    assert not stale(records, text), "run python -m tests.ops.table"
    known = read(text)
    assert not [name for name in OF_NETWORKS if known[name].fallbacks]
    assert len([row for row in known.values() if row.fallbacks]) <= MOST_FALLBACKS * len(known)


def test_a_page_that_says_too_little_is_stale():
    case = Case("relu", "float32", 0, "call", "Shard(0)", mixed=False)
    record = Record(case, (2,), OK, fallbacks=["aten::sort"], rules={"aten::relu": "[... -> ...] dp: cut"})
    made = page(*rows([record]))
    assert read(made) == {"relu": Row({"relu"}, {"sort"})}
    assert not stale([record], made)
    assert stale([record], made.replace("| `sort` |", "|  |")) == ["relu: sort"]
    assert stale([record], "") == ["relu: sort"]


def test_results_that_differ_are_told_apart():
    x = torch.arange(6.0).reshape(2, 3)
    assert not difference((x, [1, None]), (x + 1e-6, [1, None]))
    assert "for tuple" in difference([x], (x,))
    assert "shape" in difference(x, x[:1])
    assert "dtype" in difference(x, x.double())
    assert "2.0 for 3.0 at (0, 2)" in difference(x, x + torch.tensor([0.0, 0, 1]))
    assert difference(torch.tensor([1]), torch.tensor([2]))
    assert not difference(torch.tensor(float("nan")), torch.tensor(float("nan")))


PLANTED = {"nn.functional.relu": WRONG, "cos": ERROR, "sin": ERROR, "tan": CRASH}


def test_planted_faults_are_found_and_cost_one_case_each(rank_pool):
    """A wrong value, an error on all ranks, on one rank only, a dead rank: named, and the rest goes on."""
    options = Options(kinds=("Shard(0)", "Replicate"), dtypes=("float32",), samples=1, backward=False)
    fresh: Any = SimpleNamespace(run=partial(rank_pool.run, fresh=True))
    for name, records in sweep(list(PLANTED), [options], jobs=1, check=check_planted, pool=fresh):
        assert {record.verdict for record in records if record.case.kind == "Shard(0)"} == {PLANTED[name]}
        assert {record.verdict for record in records if record.case.kind == "Replicate"} == {OK}

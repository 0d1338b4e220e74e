"""Every op of the table, under every placement of its operands, gives one device's value and gradients."""

import itertools
import warnings

import pytest
import torch

import shardwright as sw
from tests.tiers import one_in

from .cases import check_op, full, layouts_of, mesh
from .ops import TABLES

CALLS = [(family, name) for family, table in TABLES.items() for name in table]


def _choices(operands):
    """On one axis all pairs of layouts, a sweep over more operands; on two axes a few of all at once."""
    per_operand = [layouts_of(x.ndim) for x in operands]
    if mesh().ndim == 2:
        return [[layouts[(i + j) % len(layouts)] for j, layouts in enumerate(per_operand)] for i in (0, 1, 3)]
    if len(operands) <= 2:
        return itertools.product(*per_operand)
    base = [(sw.Replicate(),) * mesh().ndim for _ in operands]
    sweep = [
        [*base[:i], layout, *base[i + 1 :]] for i, layouts in enumerate(per_operand) for layout in layouts
    ]
    return [*sweep, [layouts[1] for layouts in per_operand]]


def _check(family, name):
    warnings.simplefilter("error")
    function, shapes = TABLES[family][name]
    operands = [full(*shape, seed=i) for i, shape in enumerate(shapes)]
    failures = []
    for layouts in _choices(operands):
        try:
            check_op(function, operands, list(layouts))
        except Exception as error:  # noqa: BLE001 - every layout is tried, all failures are told
            text = str(error).strip().splitlines()
            failures.append(f"{layouts}: {type(error).__name__}: {' / '.join(text[:4])[:400]}")
    return failures


@pytest.mark.parametrize(("family", "name"), one_in(2, CALLS, first=1))
def test_on_two_ranks(ranks, family, name):
    for failures in ranks(2, _check, family, name):
        assert not failures, "\n".join(failures)


@pytest.mark.parametrize(("family", "name"), one_in(6, CALLS))
def test_on_a_mesh_of_two_axes(ranks, family, name):
    for failures in ranks(4, _check, family, name):
        assert not failures, "\n".join(failures)


def _wrong():
    """A planted fault: an op that takes the local part for the whole."""

    def local_mean(x):
        return x.mean() if type(x) is torch.Tensor else sw.DTensor.from_local(x.to_local().mean(), mesh())

    with pytest.raises(AssertionError):
        check_op(local_mean, [full(5, 7)], [(sw.Shard(0),)])


def test_a_local_mean_goes_red(ranks):
    ranks(2, _wrong)

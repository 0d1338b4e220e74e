"""Wrong use of the public names is refused before anything is sent, in words that name what is wrong."""

from __future__ import annotations

import re

import pytest

from tests.layout import refusal_programs as programs

TEXTS = {
    "dim, distribute": r"PlacementError Shard\(2\): dim 2 is out of range, the tensor has dims -2 to 1",
    "dim, redistribute": r"PlacementError Shard\(-3\): dim -3 is out of range, the tensor has dims -2 to 1",
    "dim, from_local": r"PlacementError Shard\(5\): dim 5 is out of range",
    "dim, zeros": r"PlacementError ZigZag\(7\): dim 7 is out of range",
    "units, distribute": r"PlacementError Ragged\(\(1, 2, 3\), \(0,\)\): 3 unit counts for an axis of size 2",
    "units, redistribute": r"PlacementError Ragged\(\(1,\), \(0,\)\): 1 unit counts for an axis of size 2",
    "coord": r"PlacementError Owner\(2\): the axis has coords 0 to 1",
    "length, distribute": r"LayoutError 1 placements for a mesh of 2 axes",
    "length, redistribute": r"LayoutError 3 placements for a mesh of 2 axes",
    "length, from_local": r"LayoutError 1 placements for a mesh of 2 axes",
    "axis, distribute": r"LayoutError the mesh has no axis 'pp'; its axes are \('dp', 'tp'\)",
    "axis, redistribute": r"LayoutError the mesh has no axis 'pp'",
    "axis, rand": r"LayoutError the mesh has no axis 'pp'",
    "no placement": r"PlacementError 'Shard\(0\)' \(str\) is not a placement that can be used here",
    "swap, in an op": r"ImplicitRedistributionError .*tp: Partial\((sum|max)\)\} +<- must",
    "swap, beside a maximum": r"ImplicitRedistributionError .*tp: Partial\(max\)\} +<- must",
    "swap, no way back": r"PlanError NoTarget\(\) on axis 'tp' cannot be a target",
}


@pytest.mark.parametrize("name", TEXTS)
def test_wrong_use_is_refused_in_words(ranks, name):
    for text in ranks(4, programs.refused, name):
        assert re.match(TEXTS[name], text, re.DOTALL), text


def test_pendings_are_never_swapped_but_combined_right_to_left(ranks):
    assert ranks(4, programs.swapped_values)[0] == [[4], [5], [4], [4], [9], [8], [4], [4]]

"""The benchmark of redistributions counts what it says."""

import pytest
import typer

from bench.moves import measure
from bench.pairs import QUICK, pairs_of, parse


@pytest.mark.parametrize(
    ("sizes", "text", "of_torch"),
    [((4,), "S0 -> S1", 4.0), ((2, 2), "S0 S1 -> S1 S0", 6.0), ((4,), "P -> R", 1.0)],
)
def test_the_bytes_of_torch_are_those_of_its_collectives(ranks, sizes, text, of_torch):
    """Torch gathers over every axis in turn, then slices: known factors over the least."""
    found = ranks(4, measure, parse(text, sizes), (64, 64), 1, 1)
    assert sum(one.sent_by_torch for one in found) / found[0].least == of_torch
    assert all(len(one.ours) == len(one.theirs) == 1 for one in found)


def test_the_pairs_are_all_that_torch_can_do():
    for sizes, count in (((4,), 9), ((2, 2), 153)):
        pairs = pairs_of(sizes)
        assert len(set(pairs)) == len(pairs) == count
        assert all(parse(str(pair), sizes) == pair for pair in pairs)
        assert {parse(text, sizes) for text in QUICK[sizes]} <= set(pairs)
    with pytest.raises(typer.BadParameter, match="is no pair on a mesh"):
        parse("S0 -> S9", (4,))

"""The ways to run an op are one ordered table: a user's own is one row."""

import pytest
import torch

import shardwright as sw
from shardwright.errors import RuleError
from shardwright.tensor.dispatch.ways.table import WAYS, Way, add_way, remove_way

from .cases import close, place

X = torch.arange(12.0).view(4, 3)


class Told:
    """A decided call: it notes that it was asked, and runs the op's kernel on the local tensor."""

    def __init__(self, heard):
        self.heard = heard

    def run(self, func, args, kwargs, tensors):
        self.heard.append(func.name())
        (x,) = tensors
        return sw.DTensor.from_local(func(x.to_local(), **kwargs), x.device_mesh, x.placements)


def _a_way_of_calls():
    heard = []
    way = Way("told", of_call=lambda a: Told(heard) if a.func is torch.ops.aten.sin.default else None)
    x = place(X, [sw.Shard(0)])
    close(x.sin(), X.sin())
    add_way(way, before="view of a cut dim")
    try:
        close(x.sin(), X.sin())  # also of a call that was decided before
        close(x.sin(), X.sin())
        close(x.cos(), X.cos())
        assert heard == ["aten::sin", "aten::sin"]
    finally:
        remove_way("told")
    close(x.sin(), X.sin())
    assert len(heard) == 2


def _a_way_of_an_op():
    def run(func, args, kwargs):
        (x,) = args
        return sw.DTensor.from_local(func(x.to_local()) + 1, x.device_mesh, x.placements)

    x = place(X, [sw.Shard(0)])
    add_way(Way("one more", of_op={torch.ops.aten.sin.default: run}.get), before="rewriting")
    try:
        close(x.sin(), X.sin() + 1)
    finally:
        remove_way("one more")
    close(x.sin(), X.sin())


def _a_way_of_some_ops():
    asked = []
    x = place(X, [sw.Shard(0)])
    is_sine = [torch.ops.aten.sin.default].__contains__
    add_way(Way("some", of_op=lambda op: asked.append(op.name()), only=is_sine), before="rewriting")
    add_way(Way("calls", of_call=lambda a: asked.append(a.func.name()), only=is_sine), before="rule")
    try:
        close(x.sin(), X.sin())
        close(x.cos(), X.cos())
        assert asked == ["aten::sin", "aten::sin"]
    finally:
        remove_way("some")
        remove_way("calls")


@pytest.mark.parametrize("check", [_a_way_of_calls, _a_way_of_an_op, _a_way_of_some_ops])
def test_a_way_is_added_by_one_row_and_taken_out_again(ranks, check):
    ranks(2, check)


def test_a_way_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(
        RuleError, match=r"there is no way 'sideways'; the ways are collective by hand, .*, rule"
    ):
        add_way(Way("mine"), before="sideways")
    with pytest.raises(RuleError, match="there is no way 'mine'"):
        remove_way("mine")


def test_the_last_way_answers_for_everything():
    assert WAYS[-1].name == "rule"
    assert len({way.name for way in WAYS}) == len(WAYS)

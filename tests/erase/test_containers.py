"""Lists, dicts and attributes among the arguments and results of an erased function are as without it."""

import argparse
import collections
import dataclasses
import math
import types
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import pytest
import torch

import shardwright as sw

_HELD = {"kept": [1, 2]}


class _Number(float):
    """A number with another one hung on it."""


def _numbered(by):
    number = _Number(1.0)
    number.by = by
    return number


class _Named(NamedTuple):
    a: int
    b: int


class _Pair(_Named):
    """One with attributes."""


def _hung(by, held):
    return _with(_Pair(*held) if isinstance(held, tuple) else collections.OrderedDict(held), by=by)


def _with(x, **attributes):
    vars(x).update(attributes)
    return x


def appends(x, seen):
    seen.append(x * 2)
    return x + 1


def writes(x, found):
    found["loss"] = x.sum()
    return x + 1


def writes_inside(x, found):
    found["all"].append({"loss": x * 3})
    return x + 1


def pops(x, found):
    return x * found.pop("by")


def fills(x, seen):
    seen.appendleft(x * 2)
    return x + 1


# By name: what a call does to its second argument, and how that is made.
WRITES = {
    "a list": (appends, lambda x: [1]),
    "a list of tensors": (appends, lambda x: [x]),
    "a dict": (writes, lambda x: {}),
    "an ordered dict": (writes, lambda x: collections.OrderedDict(a=x)),
    "a list in a dict": (writes_inside, lambda x: {"all": [x]}),
    "an entry that goes": (pops, lambda x: {"by": 2.0, "x": x}),
    "a deque": (fills, lambda x: collections.deque([x])),
}


def _tensors(held):
    return [each for each in torch.utils._pytree.tree_leaves(held) if isinstance(each, torch.Tensor)]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_what_a_call_puts_into_an_argument_is_there(name, graph):
    program, make = WRITES[name]
    fast = sw.erase(program)
    for turn in range(5):
        found = []
        for call in (program, fast):
            leaf = torch.arange(3.0).add(turn).requires_grad_(graph)
            x = leaf * 1
            held = make(x)
            inner = held["all"] if name == "a list in a dict" else None
            out = call(x, held)
            if graph:
                sum(each.sum() for each in (out, *_tensors(held))).backward()
            assert inner is None or held["all"] is inner
            found.append((out, len(held), *_tensors(held), leaf.grad))
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def _hang(x):
    x.told, x._told = 5, 6
    return x + 1


def _hang_on_result(x):
    return _with(x + 1, told=5, _told=6)


def test_attributes_that_a_call_hangs_on_tensors_are_there():
    given, made = sw.erase(_hang), sw.erase(_hang_on_result)
    for _ in range(4):
        x = torch.ones(3)
        given(x)
        for each in (x, made(x)):
            assert (each.told, each._told) == (5, 6)


# By name: a program, and two arguments that look alike.
ALIKE = {
    "zeros": (lambda x, by: x * by, np.float32(0.0), np.float32(-0.0)),
    "imaginary zeros": (lambda x, by: torch.view_as_real(torch.full((2,), by)), 0j, -0j),
    "attributes of numbers": (lambda x, by: x * by.by, _numbered(1.0), _numbered(2.0)),
    "classes of numbers": (lambda x, by: x * (1 + (type(by) is float)), _numbered(1.0), 1.0),
    "keys": (lambda x, by: x * (1 + any(isinstance(key, int) for key in by)), {1: 0}, {1.0: 0}),
    "signs of keys": (lambda x, by: x * math.copysign(1.0, max(by)), {0.0: 0}, {-0.0: 0}),
    "attributes of dicts": (lambda x, by: x * by.by, _hung(1.0, {}), _hung(2.0, {})),
    "attributes of tuples": (lambda x, by: x * by.by, _hung(1.0, (0, 1)), _hung(2.0, (0, 1))),
    "sizes": (lambda x, by: x * (1 + isinstance(by, torch.Size)), (3,), torch.Size([3])),
    "private attributes": (
        lambda x, by: x * by._by, _with(torch.ones(1), _by=1.0), _with(torch.ones(1), _by=2.0),
    ),
    "what attributes hold": (
        lambda x, by: x * by.by["by"],
        _with(torch.ones(1), by={"by": 1.0}), _with(torch.ones(1), by={"by": 2.0}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ALIKE)
def test_arguments_that_look_alike_are_told_apart(name):
    program, one, other = ALIKE[name]
    fast, x = sw.erase(program), torch.arange(1.0, 4.0)
    for by in (one, other, one, other):
        found, wanted = fast(x, by), program(x, by)
        assert torch.equal(found, wanted)
        assert torch.equal(found.signbit(), wanted.signbit())


@pytest.mark.parametrize("kind", ["OrderedDict", "Counter", "UserDict", "ChainMap"])
def test_what_a_call_hangs_on_a_dict_of_the_standard_library_is_there(kind):
    held = getattr(collections, kind)({"a": 1})

    def hangs(x):
        held.told = x * 2
        return x + 1

    fast = sw.erase(hangs)
    for turn in range(5):
        x = torch.ones(3) + turn
        torch.testing.assert_close((fast(x), held.told), (x + 1, x * 2))


def test_a_dict_that_is_changed_in_place_where_a_tensor_holds_it_is_read_again():
    fast, x = sw.erase(lambda x: x * x.told["by"]), _with(torch.ones(3), told={"by": 1.0})
    for by in (1.0, 1.0, 2.0, 2.0):
        x.told["by"] = by
        torch.testing.assert_close(fast(x), torch.ones(3) * by)


def test_what_the_program_holds_comes_back_itself():
    fast, held = sw.erase(lambda x, given: (x + 1, _HELD["kept"], given, x.shape)), [3]
    for _ in range(4):
        out, kept, given, shape = fast(torch.ones(3), held)
        assert kept is _HELD["kept"]
        assert given is held
        assert shape == out.shape
        assert type(shape) is torch.Size


class _Marked(torch.Tensor):
    """A class of the program's own."""


def test_a_result_of_another_class_stays_of_it():
    fast = sw.erase(lambda x: x * 2)
    for _ in range(3):
        assert type(fast(torch.ones(2).as_subclass(_Marked))) is _Marked


_WITHOUT_STRIDES = {
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR")
@pytest.mark.parametrize("kind", _WITHOUT_STRIDES)
def test_a_tensor_without_strides_runs_as_it_is(kind):
    """Among the arguments, or among what the program holds."""
    held = _WITHOUT_STRIDES[kind]()
    for function in (lambda x: (x * 2).values().sum(), lambda _: (held * 2).values().sum()):
        fast = sw.erase(function)
        for _ in range(3):
            given = _WITHOUT_STRIDES[kind]()
            torch.testing.assert_close(fast(given), function(given))


def test_calls_that_raised_are_no_attempts():
    settings = {"raises": True}

    def program(x):
        if settings["raises"]:
            raise ValueError("not yet")
        return x * 2

    fast = sw.erase(program)
    for turn in range(7):
        settings["raises"] = turn < 4
        with pytest.raises(ValueError, match="not yet") if turn < 4 else nullcontext():
            assert torch.equal(fast(torch.ones(2)), torch.full((2,), 2.0))
    assert fast.report().replays == 2, str(fast.report())


@dataclasses.dataclass(frozen=True)
class _Data:
    x: torch.Tensor
    scale: float
    more: object = None


@dataclasses.dataclass(slots=True)
class _Slots:
    x: torch.Tensor
    scale: float
    more: object = None


class _Own:
    offset = 1.0

    def __init__(self, x, scale, more=None):
        self.x, self.scale, self.more = x, scale, more


class _User(collections.UserDict):
    offset = 1.0

    def __init__(self, x, scale, more=None):
        super().__init__(x=x, scale=scale, more=more)

    def __getattr__(self, name):
        return self.__dict__["data"][name]


BATCHES = {
    "dataclass": _Data,
    "with slots": _Slots,
    "own": _Own,
    "user dict": _User,
    "namespace": lambda x, scale, more=None: types.SimpleNamespace(x=x, scale=scale, more=more),
    "arguments": lambda x, scale, more=None: argparse.Namespace(x=x, scale=scale, more=more),
}


@pytest.mark.parametrize("made", BATCHES.values(), ids=BATCHES)
def test_new_objects_that_hold_a_batch_are_replayed(made):
    """Their tensors may be of a graph, and be written; numbers, classes and what holds them are watched."""
    weight = torch.arange(4.0).requires_grad_()

    def program(b):
        b.x.data.add_(1)
        y = b.x * b.scale * b.more["inner"].x * getattr(b, "offset", 1.0)
        return made(y.sin(), 2.0, [b.x.detach() + 1])

    fast, kept = sw.erase(program), []
    for run in (program, fast):
        for turn in range(10):
            _Own.offset = _User.offset = 2.0 if turn >= 8 else 1.0
            leaf = torch.full((4,), 0.1 * turn).requires_grad_()
            x, scale = leaf * weight, 3.0 if turn == 4 else 1.0
            out = run(made(x, scale, {"inner": made(torch.ones(4) * turn, 1.0)}))
            out.x.sum().backward()
            kept.append((type(out), out.x.detach(), out.scale, out.more[0], leaf.grad, x.detach()))
    _Own.offset = _User.offset = 1.0
    for one, two in zip(kept[:10], kept[10:], strict=True):
        for a, b in zip(one, two, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a is b or a == b
    assert fast.report().replays >= 6, str(fast.report())


def test_one_list_or_object_at_two_places_is_not_two():
    def program(a, b):
        return a.x[0] * 2 if a.x is b["x"] else b["x"][0] * 3

    def twice(x):
        return [made := [x * 2], made]

    fast, of_results = sw.erase(program), sw.erase(twice)
    for turn in range(6):
        x = torch.full((4,), 1.0 + turn)
        a = _Own([x], 1.0)
        assert torch.equal(fast(a, {"x": a.x if turn % 2 else [x]}), x * (2 if turn % 2 else 3))
        one, two = of_results(x)
        assert one is two
    assert fast.report().replays == 4


@pytest.mark.parametrize("made", [lambda x: [x], lambda x: _Own(x, 1.0)])
def test_a_list_or_object_that_the_program_holds_is_told_from_an_equal_one(made):
    x = torch.ones(4)
    held = {"first": made(x)}
    fast = sw.erase(lambda given: x * (2 if given is held["first"] else 3))
    for turn in range(6):
        assert torch.equal(fast(held["first"] if turn % 2 else made(x)), x * (2 if turn % 2 else 3))
    assert fast.report().replays == 4


def test_objects_that_a_call_changes_are_those_that_were_given():
    def program(b):
        b.x, b.more = b.x * 2, [b.x]
        return b.x + 1

    fast, weight = sw.erase(program), torch.ones(4).requires_grad_()
    for turn in range(5):
        x = torch.full((4,), float(turn))
        b = _Own(x * weight if turn % 2 else x, 1.0)
        assert torch.equal(fast(b), x * 2 + 1)
        assert torch.equal(b.x, x * 2)
        assert torch.equal(b.more[0], x)
    assert fast.report().recordings == 0


class _Holder:
    def __init__(self, x, model):
        self.x, self.model = x, model


def test_objects_that_hold_more_than_a_batch_count_as_that_object():
    """One that holds a model, or itself, is told by identity."""
    holder = _Holder(torch.ones(4), torch.nn.Linear(4, 4))
    fast = sw.erase(lambda h: h.x * 2)
    for _ in range(4):
        assert torch.equal(fast(holder), torch.full((4,), 2.0))
    assert fast.report().replays == 3
    holder.x = torch.zeros(4)
    assert torch.equal(fast(holder), torch.zeros(4))
    itself = _Own(torch.ones(4), 1.0)
    itself.more = itself
    assert torch.equal(fast(itself), torch.full((4,), 2.0))

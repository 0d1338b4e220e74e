"""What objects of C, modules, keys, slots and private names hold is read again by an erased function."""

import logging
import operator
import os
import sys
import types
from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch

import shardwright as sw

_NUMBERS, _LIST = {"scale": 1.0}, [1.0]
_SETTINGS = types.ModuleType("shardwright_test_package.settings")
_PACKAGE = types.ModuleType("shardwright_test_package")
_SETTINGS.scale, _PACKAGE.settings, _PACKAGE.__path__ = 1.0, _SETTINGS, []
_WEIGHT = torch.nn.Parameter(torch.ones(3))
_LOGGER, _ABOVE = logging.getLogger("shardwright_test.below"), logging.getLogger("shardwright_test")


class _Private:
    __slots__ = ("__scale",)

    def set(self, v):
        self.__scale = v

    def scaled(self, x):
        return x * self.__scale


class _Keyed:
    scale = 1.0


class _One:
    scale = 1.0


class _Other:
    scale = 2.0


class _Based(_One):
    pass


class _Tabled:
    __numbers__ = _NUMBERS

    def scaled(self, x):
        return x * self.__numbers__["scale"]


class _Makes(dict):
    """What it gives it makes anew each time, as tables of activations do."""

    def __getitem__(self, key):
        kind, *numbers = super().__getitem__(key)
        return kind(*numbers)


class _Loads(Sequence):
    """What it gives it would load."""

    def __init__(self, scale):
        self.scale = scale

    def __len__(self):
        return 1

    def __getitem__(self, place):
        raise AssertionError("nobody asks for it")


_MADE = {v: (float, v) for v in (1.0, 2.0)}
_MAKES, _LOADS = _Makes(scale=_MADE[1.0]), _Loads(1.0)


_PRIVATE, _KEY, _BASED = _Private(), _Keyed(), _Based()
_BY_KEY, _VALUES, _ITEMS, _GET, _FIRST = (
    {_KEY: 1},
    _NUMBERS.values(),
    _NUMBERS.items(),
    _NUMBERS.get,
    _LIST.__getitem__,
)
_OF_FIRST = operator.itemgetter(0)
_FROM = {"__name__": "shardwright_test_package.program", "__package__": "shardwright_test_package"}
_TEXT = """
def from_package(x):
    from . import settings
    return x * settings.scale

def from_module(x):
    from .settings import scale
    return x * scale

def by_name(x):
    import sys
    return x * sys.modules["shardwright_test_package.settings"].scale
"""
exec(compile(_TEXT, __file__, "exec"), _FROM)  # noqa: S102 - a module in a package


def _number(v):
    _NUMBERS["scale"] = _LIST[0] = v


def _setting(v):
    _SETTINGS.scale = v


def _environment(v):
    os.environ["SHARDWRIGHT_TEST_SCALE"] = str(v)


_SCALED = {1.0: lambda x: x, 2.0: lambda x: x * 2}


def _function_of_torch(v):
    torch.shardwright_test_scaled = _SCALED[v]


def _base(v):
    _Based.__bases__ = (_One if v == 1 else _Other,)


def _hidden(v):
    globals().pop("max", None)
    if v > 1:
        globals()["max"] = lambda *numbers: v


_ASK, _VARIABLE = os.getenv, "SHARDWRIGHT_TEST_SCALE"
# By name: how a program reads a number, and how it is set.
HOLDERS = {
    "values of a dict": (lambda x: x * sum(_VALUES), _number),
    "items of a dict": (lambda x: x * dict(_ITEMS)["scale"], _number),
    "a method of a dict": (lambda x: x * _GET("scale"), _number),
    "a method of a list": (lambda x: x * _FIRST(0), _number),
    "an operator of a list": (lambda x: x * _OF_FIRST(_LIST), _number),
    "a key": (lambda x: x * sum(key.scale for key in _BY_KEY), lambda v: setattr(_KEY, "scale", v)),
    "a table of a class under a name as Python's": (_Tabled().scaled, _number),
    "a dict that makes what it gives": (
        lambda x: x * _MAKES["scale"], lambda v: _MAKES.update(scale=_MADE[v]),
    ),
    "a sequence that loads": (lambda x: x * _LOADS.scale, lambda v: setattr(_LOADS, "scale", v)),
    "a private slot": (_PRIVATE.scaled, _PRIVATE.set),
    "a class below": (lambda x: x * _BASED.scale, _base),
    "a private name on a parameter": (lambda x: x * _WEIGHT._scale, lambda v: setattr(_WEIGHT, "_scale", v)),
    "a module of the package": (_FROM["from_package"], _setting),
    "a name of a module of the package": (_FROM["from_module"], _setting),
    "a module by its name": (_FROM["by_name"], _setting),
    "an alias of what asks for the environment": (lambda x: x * float(_ASK(_VARIABLE)), _environment),
    "the arguments of the program": (lambda x: x * float(sys.argv[-1]), lambda v: sys.argv.append(str(v))),
    "a function that torch is given": (lambda x: torch.shardwright_test_scaled(x) + 0, _function_of_torch),
    "a name of Python's that is hidden": (lambda x: x * max(1.0, 0.5), _hidden),
    "the level of a logger above": (
        lambda x: x * (2 if _LOGGER.isEnabledFor(logging.INFO) else 1),
        lambda v: _ABOVE.setLevel(logging.INFO if v == 2 else logging.ERROR),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.setitem(sys.modules, _PACKAGE.__name__, _PACKAGE)
    monkeypatch.setitem(sys.modules, _SETTINGS.__name__, _SETTINGS)
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setenv("SHARDWRIGHT_TEST_SCALE", "1.0")
    monkeypatch.setattr(torch, "shardwright_test_scaled", None, raising=False)
    yield
    globals().pop("max", None)


@pytest.mark.parametrize("name", HOLDERS)
def test_a_number_that_something_holds_is_read_again(name):
    program, put = HOLDERS[name]
    fast, x = sw.erase(program), torch.arange(3.0)
    for v in (1.0, 1.0, 1.0, 2.0, 2.0, 1.0):
        put(v)
        torch.testing.assert_close(fast(x), program(x), rtol=0, atol=0)
    assert fast.report().replays >= 2 or name == "the arguments of the program", str(fast.report())


def test_a_dict_is_not_filled_by_asking_it():
    """One that makes what is missing."""
    missed = defaultdict(float, scale=1.0)
    fast, x = sw.erase(lambda x: x * missed.get("scale", 2.0)), torch.arange(3.0)
    for scale in (1.0, 1.0, 2.0, 2.0):
        if scale > 1:
            missed.pop("scale", None)
        torch.testing.assert_close(fast(x), x * scale)
    assert (fast.report().replays, dict(missed)) == (2, {}), str(fast.report())


def _module_that_comes(monkeypatch, tmp_path):
    (tmp_path / "shardwright_test_late.py").write_text("scale = 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)

    def program(x):
        import shardwright_test_late

        return x * shardwright_test_late.scale

    return program


def test_a_module_that_the_first_call_imports_is_read_again(monkeypatch, tmp_path):
    program = _module_that_comes(monkeypatch, tmp_path)
    fast, x = sw.erase(program), torch.arange(3.0)
    for v in (None, 1.0, 2.0, 2.0):
        if v is not None:
            sys.modules["shardwright_test_late"].scale = v
        torch.testing.assert_close(fast(x), x * (v or 1.0))
    assert fast.report().replays == 2, str(fast.report())


def _counts_writes(x):
    return x * _WEIGHT._version


def _looks_at_frames(x):
    return x * sys._getframe().f_globals["_LIST"][0]


@pytest.mark.parametrize("program", [_counts_writes, _looks_at_frames])
def test_what_nobody_can_watch_is_refused(program):
    fast, x = sw.erase(program), torch.arange(3.0)
    for v in (1.0, 2.0, 3.0):
        _number(v)
        with torch.no_grad():
            _WEIGHT.add_(0)
        torch.testing.assert_close(fast(x), program(x))
    assert fast.report().recordings == 0, str(fast.report())
    assert f"{__file__}:" in str(fast.report()), str(fast.report())


def _sharpened(model, optimizer):
    """Weights are moved through `data` for a second backward, and are the ones from before then."""

    def step(x):
        model(x).square().mean().backward()
        kept = {}
        for p in model.parameters():
            kept[p] = p.data
            p.data = p.data + 0.05 * p.grad
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        for p in model.parameters():
            p.data = kept[p]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def test_memory_that_a_call_gives_a_tensor_for_a_while_is_read_meanwhile():
    kept = []
    for erased in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))
        step = _sharpened(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run = sw.erase(step) if erased else step
        kept.append([run(torch.randn(5, 4)) for _ in range(5)] + [*model.parameters()])
    for one, two in zip(*kept, strict=True):
        assert torch.equal(one, two)
    assert run.report().replays == 4, str(run.report())

"""What an erased function reads from classes, functions, schedulers and the environment is never of old."""

import decimal
import functools
import multiprocessing
import os
import queue
import sys
import threading
import types
import weakref
from concurrent.futures import Future
from contextvars import ContextVar

import numpy as np
import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.testing import rank_mesh

from . import programs

optim = torch.optim


class _Settings:
    scale = 1.0


class _Scaled(nn.Module):
    factor = 1.0

    def forward(self, x):
        return x * self.factor


def _helper():
    return 0.0


_CONTEXT, _DEFAULT = ContextVar("scale", default=1.0), ContextVar("scales", default=[1.0])  # noqa: B039
_LOCAL = threading.local()
_SCALED, _OF_SETTINGS = _Scaled(), _Settings()


def _set_context(v):
    _CONTEXT.set(v)


def _set_environment(v):
    os.environ["SHARDWRIGHT_TEST_SCALE"] = str(v)


_OTHER = types.ModuleType("other_settings")
_SET, _ORDERED, _EVENT = set(), {"one": 1.0, "other": 2.0}, threading.Event()
_BY_NAME, _REFERENCE = types.SimpleNamespace(module=_OTHER), weakref.ref(_OF_SETTINGS)
programs.other = _OTHER


def _set_set(v):
    _SET.clear()
    _SET.add(v)


def _set_order(v):
    one, other = ("one", "other") if v == 2 else ("other", "one")  # the length and the items stay
    _ORDERED[one] = _ORDERED.pop(one)
    _ORDERED[other] = _ORDERED.pop(other)


def _typed(name):
    """A program and its number, as a prompt, `python -c` or a notebook has them."""
    space = {"__name__": "__main__", "scale": 1.0}
    exec(compile("def program(x):\n    return x * scale\n", name, "exec"), space)  # noqa: S102
    return space["program"], lambda v: space.update(scale=v)


def _set_event(v):
    (_EVENT.set if v == 2 else _EVENT.clear)()


class _Dict(dict):
    scale = 1.0


_DICT = _Dict(one=1)


class _Own:
    """A descriptor with a number of its own."""

    def __init__(self):
        self.scale = [1.0]

    def __get__(self, owner, cls=None):
        return self.scale[0]


class _Scales(type):
    scale = 1.0


class _Described(metaclass=_Scales):
    own = _Own()

    @functools.singledispatchmethod
    def by_kind(self, kind):
        return kind


class _Live:
    scale = 1.0


class _Number(float):
    """A number with another one hung on it."""


_NUMBER, _APPLIED = _Number(1.0), functools.partial(lambda x: x * _APPLIED.scale)
_TOLD = np.ones(1).view(type("Told", (np.ndarray,), {}))


def _remembering():
    """Programs whose number only a cache, or another object of the standard library, holds."""
    live, future, numbers = _Live(), Future(), {1: 1.0, 2: 2.0}
    kept, waiting = weakref.WeakSet([live]), queue.Queue()
    future.set_result([1.0])
    waiting.put(1.0)
    settings, of_name = functools.cache(_Live), functools.lru_cache(lambda name: {name: 1.0})

    class Cached:
        @functools.lru_cache  # noqa: B019 - what is tested
        def scale(self):
            return [1.0]

    cached, of_kind = Cached(), functools.singledispatch(lambda kind: kind)

    def registered():
        scale = 1.0

        @of_kind.register
        def _(kind: int):
            return scale

        def put(v):
            nonlocal scale
            scale = v

        return put

    def set_order(v):
        if v == 2:
            numbers[1] = numbers.pop(1)

    return {
        "what a cache answered": (lambda x: x * settings().scale, lambda v: setattr(settings(), "scale", v)),
        "what a bounded cache answered": (
            lambda x: x * of_name("a")["a"],
            lambda v: of_name("a").update(a=v),
        ),
        "what a cached method answered": (
            lambda x: x * cached.scale()[0],
            lambda v: cached.scale().__setitem__(0, v),
        ),
        "a registered function": (lambda x: x * of_kind(1), registered()),
        "a registered method": (
            lambda x: x * _Described().by_kind(1),
            lambda v: _Described.by_kind.register(int, lambda self, kind: v),
        ),
        "an attribute of a number": (lambda x: x * _NUMBER.scale, lambda v: setattr(_NUMBER, "scale", v)),
        "an attribute of a partial": (_APPLIED, lambda v: setattr(_APPLIED, "scale", v)),
        "an attribute of an array": (lambda x: x * _TOLD.scale, lambda v: setattr(_TOLD, "scale", v)),
        "a queue": (lambda x: x * waiting.queue[0], lambda v: waiting.queue.__setitem__(0, v)),
        "a weak set": (lambda x: x * sum(each.scale for each in kept), lambda v: setattr(live, "scale", v)),
        "a future": (lambda x: x * future.result()[0], lambda v: future.result().__setitem__(0, v)),
        "a descriptor": (
            lambda x: x * _Described().own,
            lambda v: vars(_Described)["own"].scale.__setitem__(0, v),
        ),
        "the class of a class": (lambda x: x * _Described.scale, lambda v: setattr(_Scales, "scale", v)),
        "the order of numbers in a dict": (lambda x: x * (list(numbers).index(1) + 1), set_order),
    }


def _in_shared_memory():
    """Numbers that other processes may write: of C, and refused."""
    value, flag = multiprocessing.Value("d", 1.0), multiprocessing.Event()
    return {
        "memory that processes share": (lambda x: x * value.value, lambda v: setattr(value, "value", v)),
        "an event of processes": (
            lambda x: x * 2 if flag.is_set() else x,
            lambda v: (flag.set if v == 2 else flag.clear)(),
        ),
    }


def _wrapped():
    """Programs whose number is in a cell behind a function of torch, of Python or of the library."""
    scale = 1.0

    class OfMethods(nn.Module):
        @staticmethod
        def fixed():
            return scale

        @property
        def own(self):
            return scale

        @torch.no_grad()
        def helper(self, x, by=(1.0,)):
            return x * scale * by[0]

        def forward(self, x):
            return self.helper(x) * self.fixed() * self.own

    def put(v):
        nonlocal scale
        scale = v
        remembered.cache_clear()

    @functools.cache
    def remembered():
        return scale

    decorated, erased = torch.no_grad()(lambda x: x * scale), sw.erase(lambda x: x * scale)
    return {
        "behind a decorator of torch": (lambda x: decorated(x) + 0, put),
        "behind a cache": (lambda x: x * remembered(), put),
        "inside another erased function": (lambda x: erased(x) + 0, put),
        "the methods of a class": (OfMethods(), put),
    }


class _Patched:
    def scaled(self, x):
        return x


class _PatchedModule(nn.Module):
    def forward(self, x):
        return x


class _Thrice(_PatchedModule):
    def forward(self, x):
        return x * 3


_PATCHED, _SWAPPED = _Patched(), _PatchedModule()


def _set_method(v):
    _Patched.scaled = lambda self, x: x * v


def _set_forward(v):
    _PatchedModule.forward = lambda self, x: x * v


class _Holding:
    scale, held = 1.0, torch.ones(3)


def _set_beside_a_tensor(v):
    _Holding.scale, _Holding.held = v, torch.ones(3)  # whose `==` is no yes or no


# By name: how a program reads a number, and how it is set.
HOLDERS = {
    "a class": (lambda x: x * _Settings.scale, lambda v: setattr(_Settings, "scale", v)),
    "a class that holds a tensor": (lambda x: x * _Holding.scale, _set_beside_a_tensor),
    "the class of an object": (lambda x: x * _OF_SETTINGS.scale, lambda v: setattr(_Settings, "scale", v)),
    "the class of a module": (_SCALED, lambda v: setattr(_Scaled, "factor", v)),
    "a function": (lambda x: x * (_helper() + _helper.scale), lambda v: setattr(_helper, "scale", v)),
    "a context variable": (lambda x: x * _CONTEXT.get(), _set_context),
    "what a context variable begins with": (
        lambda x: x * _DEFAULT.get()[0],
        lambda v: _DEFAULT.get().__setitem__(0, v),
    ),
    "the thread": (lambda x: x * _LOCAL.scale, lambda v: setattr(_LOCAL, "scale", v)),
    "a set": (lambda x: x * sum(_SET), _set_set),
    "the order of a dict": (lambda x: x * [*_ORDERED].index("one"), _set_order),
    "an event": (lambda x: x * 2 if _EVENT.is_set() else x, _set_event),
    "what a weak reference refers to": (
        lambda x: x * _REFERENCE().scale,
        lambda v: setattr(_OF_SETTINGS, "scale", v),
    ),
    "an attribute of a dict": (lambda x: x * _DICT.scale, lambda v: setattr(_DICT, "scale", v)),
    "a module in a module": (lambda x: x * programs.other.SCALE, lambda v: setattr(_OTHER, "SCALE", v)),
    "a module in an object": (lambda x: x * _BY_NAME.module.SCALE, lambda v: setattr(_OTHER, "SCALE", v)),
    "a method that is replaced": (lambda x: _PATCHED.scaled(x) + 0, _set_method),
    "a forward that is replaced": (_PatchedModule(), _set_forward),
    "the class that an object is given": (
        _SWAPPED,
        lambda v: setattr(_SWAPPED, "__class__", _Thrice if v > 1 else _PatchedModule),
    ),
    "what is typed": _typed("<stdin>"),
    "what a notebook runs": _typed("<ipython-input-3-5f0c>"),
    **_wrapped(),
    **_remembering(),
    **_in_shared_memory(),
    "the environment": (lambda x: x * float(os.environ["SHARDWRIGHT_TEST_SCALE"]), _set_environment),
}


def _read(name):
    program, put = HOLDERS[name]
    mesh = rank_mesh((2,), ("dp",))
    x = torch.randn(4, 3)
    given = sw.distribute_tensor(x, mesh, [sw.Shard(0)], src_data_rank=0)
    x = given.full_tensor()
    fast = sw.erase(program)
    for value in (1.0, 1.0, 1.0, 2.0, 2.0, 3.0):
        put(value)
        torch.testing.assert_close(fast(given).full_tensor(), program(x))


@pytest.mark.parametrize("name", HOLDERS)
def test_a_number_that_changes_is_read_again(ranks, name):
    ranks(2, _read, name, timeout=60)


def _by_references(box):
    kept = [weakref.ref(each) for each in box.values()]
    return lambda x: x * sum(each() is not None for each in kept)


def _by_a_set(box):
    kept = weakref.WeakSet(box.values())
    return lambda x: x * sum(each.scale for each in kept)


def _by_values(box):
    kept = weakref.WeakValueDictionary(box)
    return lambda x: x * sum(each.scale for each in kept.values())


def _by_keys(box):
    kept = weakref.WeakKeyDictionary((each, 1.0) for each in box.values())
    return lambda x: x * sum(kept.values())


@pytest.mark.parametrize("of", [_by_references, _by_a_set, _by_values, _by_keys])
def test_a_recording_keeps_nothing_alive_that_is_referred_to_weakly(of):
    box = {"one": _Live(), "other": _Live()}
    fast, x = sw.erase(of(box)), torch.arange(4.0)
    for turn in range(7):
        if turn in {3, 5}:
            box.popitem()
        torch.testing.assert_close(fast(x), x * len(box))
    assert fast.report().replays == 4, str(fast.report())


def test_what_a_proxy_stands_for_is_looked_at():
    model, x = _Scaled(), torch.arange(4.0)
    proxy = weakref.proxy(model)
    fast = sw.erase(lambda x: proxy.forward(x) + 0)
    for factor in (1.0, 1.0, 2.0, 2.0):
        model.factor = factor
        torch.testing.assert_close(fast(x), x * factor)
    assert fast.report().replays == 2, str(fast.report())


class _ScaledSteps(optim.SGD):
    """An optimizer of the user's, with a setting of its own."""

    scale = 1.0

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(self.scale)
        super().step()


def _halves(p):
    p.grad.mul_(0.5)


def _global_hooks():
    of_optimizers = sys.modules[optim.Optimizer.__module__]
    return {
        "every forward": lambda: nn.modules.module.register_module_forward_hook(lambda m, x, y: y * 0.5),
        "every step": lambda: of_optimizers.register_optimizer_step_pre_hook(
            lambda o, args, kwargs: _halves(o.param_groups[0]["params"][0])
        ),
    }


# What changes a step, in the turn that is given.
CHANGES = {
    "a hook of a parameter": lambda m, o: m.weight.register_hook(lambda g: g * 0.5),
    "a hook after its gradient": lambda m, o: m.weight.register_post_accumulate_grad_hook(_halves),
    "a setting of the optimizer's own": lambda m, o: setattr(o, "scale", 0.5),
    **{f"a hook of {name}": lambda m, o, add=add: add() for name, add in _global_hooks().items()},
}


def _changed(name):
    mesh = rank_mesh((2,), ("dp",))

    def run(erase):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        x = torch.ones(4, 3)
        if erase:
            sw.distribute_module(model, mesh, {"*": {"dp": sw.Replicate()}})
            x = sw.distribute_tensor(x, mesh, [sw.Replicate()])
        optimizer, hook = _ScaledSteps(model.parameters(), lr=0.01), None

        def step():
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

        fast = sw.erase(step) if erase else step
        for turn in range(7):
            hook = CHANGES[name](model, optimizer) if turn == 3 else hook
            fast()
            if turn == 4 and hook is not None:
                hook.remove()
        assert not erase or fast.report().replays, str(fast.report())
        return model.weight.detach()

    torch.testing.assert_close(run(True).full_tensor(), run(False))


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_a_step_later_is_noticed(ranks, name):
    ranks(2, _changed, name, timeout=60)


class _Slotted:
    __slots__ = ("by",)


_SLOTTED, _ABSENT = _Slotted(), {"__name__": "absent_at_first"}
_TEXT = "def program(x):\n    try:\n        return x * by\n    except NameError:\n        return x + 0\n"
exec(compile(_TEXT, __file__, "exec"), _ABSENT)  # noqa: S102 - a module whose global comes later
# By name: a program, and how what it asks for in vain comes to be there.
LATER = {
    "a slot": (lambda x: x * getattr(_SLOTTED, "by", 1.0), lambda: setattr(_SLOTTED, "by", 2.0)),
    "a global": (_ABSENT["program"], lambda: _ABSENT.update(by=2.0)),
}


@pytest.mark.parametrize("name", LATER)
def test_what_is_not_there_yet_is_asked_for_again(name):
    program, put = LATER[name]
    fast, x = sw.erase(program), torch.arange(4.0)
    for turn in range(6):
        if turn == 3:
            put()
        torch.testing.assert_close(fast(x), x * (2.0 if turn >= 3 else 1.0))
    assert fast.report().replays == 4, str(fast.report())


def _steps_the_schedule():
    """A schedule that leaves the rate as it is for a while has stepped all the same."""
    p = nn.Parameter(sw.distribute_tensor(torch.ones(4), rank_mesh((2,), ("dp",)), [sw.Shard(0)]))
    optimizer = optim.SGD([p], lr=0.1)
    schedule = optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    def step():
        optimizer.zero_grad()
        p.square().sum().backward()
        optimizer.step()
        schedule.step()

    fast = sw.erase(step)
    for _ in range(7):
        fast()
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**2, str(fast.report())
    assert "steps" in str(fast.report()), str(fast.report())


def test_a_schedule_that_a_step_steps_goes_on(ranks):
    ranks(2, _steps_the_schedule)


def _own_generator_of_numpy():
    generator, same = np.random.default_rng(0), np.random.default_rng(0)
    given = sw.distribute_tensor(torch.ones(4), rank_mesh((2,), ("dp",)), [sw.Shard(0)])
    fast = sw.erase(lambda x: x * generator.random())
    for _ in range(4):
        torch.testing.assert_close(fast(given).full_tensor(), torch.ones(4) * same.random())


def _generator_beside():
    """Drawn from between calls only, it is nothing that a replay would have to know."""
    holder = types.SimpleNamespace(generator=np.random.default_rng(0), scale=2.0)
    given = sw.distribute_tensor(torch.ones(4), rank_mesh((2,), ("dp",)), [sw.Shard(0)])
    fast = sw.erase(lambda x: x * holder.scale)
    for _ in range(4):
        holder.generator.random()
        torch.testing.assert_close(fast(given).full_tensor(), 2 * torch.ones(4))
    assert fast.report().replays == 3, str(fast.report())


def test_a_generator_that_is_not_asked_is_no_guard(ranks):
    ranks(2, _generator_beside)


def _chain():
    """Functions of which each names the next: more than Python calls in one another."""
    lines = [f"def f{n}(x):\n    if x is None:\n        f{n + 1}(x)\n    return x * 2" for n in range(2000)]
    space = {"__name__": "__main__"}
    exec(compile("\n".join(lines), __file__, "exec"), space)  # noqa: S102
    given = sw.distribute_tensor(torch.ones(4), rank_mesh((2,), ("dp",)), [sw.Shard(0)])
    fast = sw.erase(space["f0"])
    for _ in range(3):
        torch.testing.assert_close(fast(given).full_tensor(), 2 * torch.ones(4))
    assert fast.report().replays == 2, str(fast.report())


def test_long_chains_of_functions_are_followed(ranks):
    ranks(2, _chain, timeout=60)


_IMPORTED = """
import hashlib
import threading

local = threading.local()

def at_import():
    hashlib.sha256(b"")
    return local

at_import()
"""


def _imports_first(folder):
    """What runs because a module is imported is no part of the program, however deep in it."""
    given = sw.distribute_tensor(torch.ones(4), rank_mesh((2,), ("dp",)), [sw.Shard(0)])

    def program(x):
        import shardwright_test_imported  # noqa: F401 - a call that imports first

        return x * 2

    fast = sw.erase(program)
    sys.path.insert(0, folder)
    try:
        for _ in range(4):
            torch.testing.assert_close(fast(given).full_tensor(), 2 * torch.ones(4))
    finally:
        sys.path.remove(folder)
    assert fast.report().replays == 3, str(fast.report())


def test_an_import_inside_is_no_part_of_the_program(ranks, tmp_path):
    (tmp_path / "shardwright_test_imported.py").write_text(_IMPORTED)
    ranks(2, _imports_first, str(tmp_path))


def test_a_generator_of_numpy_draws_each_time(ranks):
    ranks(2, _own_generator_of_numpy)


def _arguments_of_one_place():
    """An argument that is gone leaves its place in memory, and its `id`, to the next one."""
    given = sw.distribute_tensor(torch.ones(4), rank_mesh((2,), ("dp",)), [sw.Shard(0)])
    fast = sw.erase(lambda x, by: x * float(by), most=40)
    for n in range(40):
        torch.testing.assert_close(fast(given, decimal.Decimal(n)).full_tensor(), torch.ones(4) * n)


def test_an_argument_is_not_taken_for_one_that_is_gone(ranks):
    ranks(2, _arguments_of_one_place)


def _hooked_arguments():
    """Hooks of one argument are not those of the next."""
    mesh = rank_mesh((2,), ("dp",))
    fast = sw.erase(lambda x: x.square().sum().backward())
    for turn in range(8):
        x = sw.distribute_tensor(torch.ones(4), mesh, [sw.Shard(0)]).requires_grad_()
        if turn == 0:
            x.register_hook(lambda g: g * 10)
        if turn == 4:
            x.register_post_accumulate_grad_hook(_halves)
        fast(x)
        wanted = {0: 20.0, 4: 1.0}.get(turn, 2.0)
        torch.testing.assert_close(x.grad.full_tensor(), wanted * torch.ones(4))
    assert fast.report().replays >= 4, str(fast.report())


def test_hooks_of_an_argument_are_its_own(ranks):
    ranks(2, _hooked_arguments)


class _Trainer:
    def __init__(self, scale):
        self.scale = scale

    @sw.erase
    def scaled(self, x):
        return x * self.scale


def _methods():
    given = sw.distribute_tensor(torch.ones(4), rank_mesh((2,), ("dp",)), [sw.Shard(0)])
    trainers = [_Trainer(2.0), _Trainer(3.0)]
    for turn in range(4):
        for trainer in trainers:
            torch.testing.assert_close(trainer.scaled(given).full_tensor(), torch.ones(4) * trainer.scale)
        trainers[0].scale = 2.0 if turn < 2 else 5.0
    assert _Trainer.scaled.report().replays, str(_Trainer.scaled.report())


def test_a_method_is_erased_where_a_class_has_it(ranks):
    ranks(2, _methods)


def _scales_the_loss():
    p = nn.Parameter(sw.distribute_tensor(torch.ones(4), rank_mesh((2,), ("dp",)), [sw.Shard(0)]))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def backward():
        p.grad = None
        scaler.scale(p.square().sum()).backward()

    fast = sw.erase(backward)
    for scale in (4.0, 4.0, 4.0, 8.0, 8.0):
        scaler.update(scale) if scale > 4 else None
        fast()
        torch.testing.assert_close(p.grad.full_tensor(), 2 * scale * torch.ones(4))
    assert fast.report().replays >= 2, str(fast.report())


def test_a_scaler_of_torch_is_found(ranks):
    ranks(2, _scales_the_loss)


# How a step may ask for its learning rate beside the optimizer's step.
ASKED = {
    "the scheduler": lambda o, s, group: s.get_last_lr()[0],
    "the scheduler's count": lambda o, s, group: 0.1 * s.last_epoch,
    "the values of a group": lambda o, s, group: list(group.values())[1],
    "the defaults": lambda o, s, group: o.defaults["lr"],
}


def _asked(name):
    ask, mesh = ASKED[name], rank_mesh((2,), ("dp",))
    whole = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))

    def run(p, erase):
        optimizer = optim.SGD([p], lr=0.1)
        schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        group = optimizer.param_groups[0]

        def step():
            p.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                p.mul_(1 - ask(optimizer, schedule, group))

        fast = sw.erase(step) if erase else step
        for _ in range(7):
            fast()
            schedule.step()
        return p.detach()

    distributed = nn.Parameter(sw.distribute_tensor(whole.clone(), mesh, [sw.Shard(0)]))
    torch.testing.assert_close(run(distributed, True).full_tensor(), run(nn.Parameter(whole.clone()), False))


@pytest.mark.parametrize("name", ASKED)
def test_a_rate_that_is_asked_for_beside_the_step_is_the_one_of_now(ranks, name):
    ranks(2, _asked, name, timeout=60)


FUSED = {
    "AdamW": ("weight_decay", lambda p: optim.AdamW(p, lr=0.1, weight_decay=0.05, fused=True)),
    "SGD": ("weight_decay", lambda p: optim.SGD(p, lr=0.1, weight_decay=0.05, fused=True)),
    "momentum": ("dampening", lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.05, fused=True)),
}


def _equal_numbers(name):
    key, make = FUSED[name]
    mesh = rank_mesh((2,), ("dp",))
    whole = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))

    def run(p, erase):
        optimizer = make([p])

        def step():
            p.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        fast = sw.erase(step) if erase else step
        for value in (0.05, 0.05, 0.1, 0.1, 0.2, 0.3):  # 0.1 is the learning rate
            optimizer.param_groups[0][key] = value
            fast()
        return p.detach()

    distributed = nn.Parameter(sw.distribute_tensor(whole.clone(), mesh, [sw.Shard(0)]))
    torch.testing.assert_close(run(distributed, True).full_tensor(), run(nn.Parameter(whole.clone()), False))


@pytest.mark.parametrize("name", FUSED)
def test_a_number_that_equals_the_rate_is_not_the_rate(ranks, name):
    ranks(2, _equal_numbers, name, timeout=60)

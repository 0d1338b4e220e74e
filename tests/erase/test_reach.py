"""What an erased function reads from classes, functions, schedulers and the environment is never of old."""

import os
import threading
from contextvars import ContextVar

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.testing import rank_mesh

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


# By name: how a program reads a number, and how it is set.
HOLDERS = {
    "a class": (lambda x: x * _Settings.scale, lambda v: setattr(_Settings, "scale", v)),
    "the class of an object": (lambda x: x * _OF_SETTINGS.scale, lambda v: setattr(_Settings, "scale", v)),
    "the class of a module": (_SCALED, lambda v: setattr(_Scaled, "factor", v)),
    "a function": (lambda x: x * (_helper() + _helper.scale), lambda v: setattr(_helper, "scale", v)),
    "a context variable": (lambda x: x * _CONTEXT.get(), _set_context),
    "what a context variable begins with": (
        lambda x: x * _DEFAULT.get()[0],
        lambda v: _DEFAULT.get().__setitem__(0, v),
    ),
    "the thread": (lambda x: x * _LOCAL.scale, lambda v: setattr(_LOCAL, "scale", v)),
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

"""What no operator shows of a call (errors, attributes, memory, hooks, threads) is as without `erase`."""

import decimal
import logging
import sys
import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

import shardwright as sw
from shardwright.testing import rank_mesh

BY_BACKWARD = {"factor": 2.0}


def _caught(x):
    try:
        return torch.linalg.cholesky(x)
    except torch.linalg.LinAlgError:
        return torch.linalg.cholesky(x + 10 * torch.eye(4))


def _split(x, at):
    return [part.sum() for part in torch.tensor_split(x, at)]


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * BY_BACKWARD["factor"]


def _scaled(x):
    return _Scaled.apply(x).sin()


class _Counted(torch.autograd.Function):
    """A derivative that counts its calls, which no forward does."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        BY_BACKWARD["calls"] += 1
        return gradient * 2.0


def _counted(x):
    return _Counted.apply(x).sin()


def _by_attribute(weight, x):
    return x * getattr(weight, "scale", 1.0)


def _by_own_attribute(x):
    return x * getattr(_by_own_attribute, "scale", 1.0)


def _in_a_thread(held, x):
    thread = threading.Thread(target=held.add_, args=(1,))
    thread.start()
    thread.join()
    return x + held


LEFT = {  # what a call leaves otherwise: how it is read, and written
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled, (True, False)),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, (torch.float32, torch.float64)),
    "number of threads": (torch.get_num_threads, torch.set_num_threads, (1, 2)),
    "name of the thread": (
        lambda: threading.current_thread().name,
        lambda name: setattr(threading.current_thread(), "name", name),
        ("1", "2"),
    ),
    "decimal context": (
        lambda: decimal.getcontext().prec,
        lambda n: setattr(decimal.getcontext(), "prec", n),
        (7, 9),
    ),
    "level of the root logger": (
        lambda: logging.getLogger().level,
        lambda n: logging.getLogger().setLevel(n),
        (30, 40),
    ),
    "recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit, (3000, 4000)),
}


def _result(function, *args):
    """What it gives, and what it raises."""
    try:
        found = function(*args)
    except torch.linalg.LinAlgError as error:
        return type(error).__name__
    return [y.detach().clone() for y in (found if isinstance(found, list) else [found])]


def _check(function, calls, other=None):
    """Each call gives what the function itself gives. other: one with a state of its own."""
    fast, plain = sw.erase(function), other or function
    for args in calls:
        found, wanted = _result(fast, *args), _result(plain, *args)
        if isinstance(wanted, str):
            assert found == wanted
        else:
            torch.testing.assert_close(found, wanted)
    return fast


def test_errors_are_raised_again_and_branches_by_them_are_taken():
    good, bad = 2 * torch.eye(4), -torch.eye(4)
    for order in ((good, good, bad, good), (bad, bad, good, bad)):
        _check(_caught, [(x,) for x in order])
    singular = torch.zeros(4, 4)
    for function in (torch.linalg.inv, lambda x: torch.linalg.solve(x, x + 1)):
        fast = _check(function, [(x,) for x in (good, good, singular, good)])
        assert "3 replays" in str(fast.report())


def test_a_tensor_that_says_where_to_split_is_read_each_time():
    _check(_split, [(torch.arange(6.0), torch.tensor([n])) for n in (1, 1, 3, 2)])


def test_one_object_twice_is_not_two_views():
    base = torch.arange(8.0)
    one, two = base[:4], base[4:]
    _check(lambda a, b: a * 2 + b, [(one, one), (one, one), (one, two), (two, one), (one, base[:4])])


def test_what_only_a_backward_reads_is_asked_too():
    fast = sw.erase(_scaled)
    for call in range(4):
        BY_BACKWARD["factor"] = 2.0 + (call >= 2)
        found = []
        for function in (_scaled, fast):
            x = torch.arange(4.0).requires_grad_()
            function(x).sum().backward()
            found.append(x.grad)
        torch.testing.assert_close(*found)


def test_what_only_a_backward_changes_is_changed_at_each_call():
    fast, x = sw.erase(_counted), torch.arange(4.0).requires_grad_()
    BY_BACKWARD["calls"] = 0
    for call in range(4):
        fast(x).sum().backward()
        assert BY_BACKWARD["calls"] == call + 1
    assert "the call changes it" in str(fast.report())


def test_an_argument_may_hold_itself():
    x = torch.arange(4.0)
    x.itself, x.scale = x, 2.0
    fast = sw.erase(lambda y: y * y.scale)
    for scale in (2.0, 2.0, 3.0):
        x.scale = scale
        torch.testing.assert_close(fast(x), torch.arange(4.0) * scale)


@pytest.mark.parametrize("of", ["held", "given", "function"])
def test_attributes_that_a_program_hangs_on_things_are_read(of):
    weight, x = torch.nn.Parameter(torch.ones(4)), torch.arange(4.0)
    function = {
        "held": partial(_by_attribute, weight),
        "given": _by_attribute,
        "function": _by_own_attribute,
    }[of]
    fast = sw.erase(function)
    try:
        for scale in (None, None, 2.0, 3.0, 3.0):
            if scale is not None and of == "function":
                _by_own_attribute.scale = scale
            elif scale is not None or of == "held":  # of what is held it is there before
                weight.scale = scale or 1.0
            args = (weight, x) if of == "given" else (x,)
            torch.testing.assert_close(fast(*args), function(*args))
    finally:
        vars(_by_own_attribute).clear()


def test_hooks_and_forward_derivatives_around_a_call_are_seen():
    function = lambda x: (x * x).sin()  # noqa: E731
    fast, gradients, tangents = sw.erase(function), [], []
    for call in range(4):
        for each in (function, fast):
            x = torch.arange(4.0).requires_grad_()
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t)
            with hooks if call >= 2 else nullcontext():
                y = each(x)
            y.sum().backward()
            gradients.append(x.grad)
            if call >= 2:
                with forward_ad.dual_level():
                    dual = each(forward_ad.make_dual(torch.arange(4.0), torch.ones(4)))
                    tangents.append(forward_ad.unpack_dual(dual).tangent)
    for found in (gradients, tangents):
        torch.testing.assert_close(found[::2], found[1::2])


def test_threads_and_files_are_no_part_of_a_recording(tmp_path):
    held, other = torch.zeros(4), torch.zeros(4)
    _check(partial(_in_a_thread, held), [(torch.ones(4),)] * 4, partial(_in_a_thread, other))

    def saves(x, name):
        torch.save(x, tmp_path / name)
        return x + 1

    fast = sw.erase(saves)
    for call in range(3):
        fast(torch.full((2,), float(call)), "x")
        assert torch.load(tmp_path / "x")[0] == call
    assert "it writes a file" in str(fast.report())


@pytest.mark.parametrize("name", LEFT)
def test_what_stands_around_a_call_is_left_as_the_call_leaves_it(name):
    read, write, (one, other) = LEFT[name]

    def switches(x):
        write(other if read() == one else one)
        return x + 1

    fast, before = sw.erase(switches), read()
    try:
        write(one)
        for call in range(4):
            fast(torch.ones(2))
            assert read() == (one if call % 2 else other)
    finally:
        write(before)
    assert f"{name}: the call changes it" in str(fast.report())


def _unlike_ranks(traced):
    """One rank replays where the other records anew, or runs the function as it is; both send the same."""
    mesh, rank = rank_mesh((2,), ("x",)), dist.get_rank()
    torch.manual_seed(0)
    left, right = torch.randn(4, 6), torch.randn(6, 4)
    placed = [sw.distribute_tensor(x, mesh, [sw.Shard(dim)]) for dim, x in ((1, left), (0, right))]
    numbers = {"own": 1}

    def block(h, a):
        with sw.spmd(mesh):
            made = a @ placed[1]  # pending, and finished for its first reader
            return made, (torch.relu(made) + torch.relu(h)) * numbers["own"]

    fast = sw.erase(block)
    for step in range(5):
        with sw.spmd(mesh):
            x = placed[0] + step
            h = x @ placed[1]
            before = torch.sigmoid(h).sum()
        if rank == 0 and not traced:
            numbers["own"] = 1.0 if step % 2 else 1  # the same, and another recording
        with sw.trace() if rank == 0 and traced and step else nullcontext():
            made, read = fast(h, x)
        with sw.spmd(mesh):
            found = before + torch.tanh(made).sum() + read.sum() + torch.exp(h / 10).sum()
        y = (left + step) @ right
        wanted = torch.sigmoid(y) + torch.tanh(y) + 2 * torch.relu(y) + torch.exp(y / 10)
        torch.testing.assert_close(found.full_tensor(), wanted.sum())


@pytest.mark.parametrize("traced", [False, True])
def test_ranks_of_which_one_replays_send_the_same(ranks, traced):
    """What one had finished, and the other had not, was paired with messages of the next step."""
    ranks(2, _unlike_ranks, traced, timeout=60)

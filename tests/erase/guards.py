"""Cases in which a recording must not be replayed, and per guard the fault that lets it be."""

import collections
import copy
import types
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.erased import entry, finished, given, holds, surroundings
from shardwright.testing.meshes import rank_mesh

from .programs import assert_equal, full, placed

SCALE = 2.0


def _mesh():
    return rank_mesh((dist.get_world_size(),), ("tp",))


def _on_mesh(x, placement=None):
    return sw.distribute_tensor(x, _mesh(), {"tp": placement or sw.Replicate()})


def _same(fast, function, *args):
    """The erased function on DTensors, the plain one on plain tensors."""
    plain = [full(a).detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
    assert_equal(fast(*args), function(*plain))


def _x(*shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)


# ------------------------------------------------------------------------------------ arguments


def shapes():
    fast = sw.erase(lambda x: x.sum(0) * x.shape[0])
    for rows in (4, 6, 4):
        _same(fast, lambda x: x.sum(0) * x.shape[0], _on_mesh(_x(rows, 2)))


def layouts():
    fast = sw.erase(lambda x: x.cumsum(0) + x.sum())
    for placement in (sw.Replicate(), sw.Shard(0), sw.Shard(1)):
        found = fast(_on_mesh(_x(4, 4), placement))
        assert_equal(found, _x(4, 4).cumsum(0) + _x(4, 4).sum())
        assert isinstance(found, sw.DTensor)
    pending = sw.DTensor.from_local(_x(4, 4), _mesh(), [sw.Partial()])
    assert_equal(fast(pending), 2 * (_x(4, 4).cumsum(0) + _x(4, 4).sum()))


def strides():
    def flat(x):
        return x.reshape(-1) * 2

    fast = sw.erase(flat)
    for x in (_x(4, 3), _x(3, 4).t()):  # one layout; the second local tensor lies otherwise than it says
        given_x = sw.DTensor.from_local(x, _mesh(), [sw.Replicate()], shape=x.shape, stride=(3, 1))
        _same(fast, flat, given_x)


def dtypes():
    fast = sw.erase(lambda x: x / 3)
    for x in (_x(4), _x(4).double()):
        assert sw.layout_of(fast(_on_mesh(x))).dtype == x.dtype


def scalars():
    def scaled(x, s):
        return x * s

    fast = sw.erase(scaled)
    for s in (2.0, 3.0, 2, True, -0.0, 0.0):
        assert torch.equal(full(fast(_on_mesh(_x(4)), s)).signbit(), (_x(4) * s).signbit())
        _same(fast, scaled, _on_mesh(_x(4)), s)


def structure():
    fast = sw.erase(lambda *xs: sum(len(x) if isinstance(x, list) else x.sum() for x in xs))
    x = _on_mesh(_x(4))
    assert_equal(fast(x, [x, x]), _x(4).sum() + 2)
    assert_equal(fast(x, [x, x, x]), _x(4).sum() + 3)


def shared_memory():
    def written(x, y):
        x.add_(1)
        return x * y

    fast = sw.erase(written)
    both = _on_mesh(_x(4))
    assert_equal(fast(both, both), (_x(4) + 1) ** 2)
    _same(fast, written, _on_mesh(_x(4)), _on_mesh(_x(4)))


def shared_with_the_program():
    held = _on_mesh(_x(4))

    def written(x):
        held.add_(1)
        return x * held

    fast = sw.erase(written)
    assert_equal(fast(held), (_x(4) + 1) ** 2)
    assert_equal(fast(_on_mesh(_x(4))), _x(4) * (_x(4) + 2))


def places_of_memory():
    def second(x):
        return torch.as_strided(x, (2,), (1,), x.storage_offset() + 1) * 1

    fast, scaled = sw.erase(second), sw.erase(lambda x: x * x.storage_offset())
    base = _x(8)
    for at in (0, 4):
        assert_equal(scaled(base[at : at + 4]), base[at : at + 4] * at)
        assert_equal(fast(base[at : at + 4]), base[at + 1 : at + 3])


def wants_a_gradient():
    fast = sw.erase(lambda x: x * 2)
    x = _on_mesh(_x(4))
    assert not fast(x).requires_grad
    assert fast(x.detach().clone().requires_grad_()).requires_grad


# ------------------------------------------------------------------------------------ what is around


def grad_mode():
    model, place = placed(nn.Linear(4, 2), "batch", dist.get_world_size())
    fast = sw.erase(model)
    with torch.no_grad():
        assert not fast(place(_x(2, 4))).requires_grad
    out = fast(place(_x(2, 4)))
    out.sum().backward()
    with torch.no_grad():
        assert not fast(place(_x(2, 4))).requires_grad


def autocast():
    def product(x):
        return x @ x

    fast = sw.erase(product)
    x = _on_mesh(_x(4, 4))
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert fast(x).dtype == torch.bfloat16
        assert fast(x).dtype == torch.float32


def default_dtype():
    fast = sw.erase(lambda x: x.to(torch.get_default_dtype()))
    x = _on_mesh(_x(4))
    assert fast(x).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert fast(x).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def default_device():
    fast = sw.erase(lambda x: x * (3 if torch.empty(0).is_meta else 2))
    x = _on_mesh(_x(4))
    for _ in range(3):
        assert_equal(fast(x), _x(4) * 2)
    for _ in range(3):
        with torch.device("meta"):
            found = fast(x)
        assert_equal(found, _x(4) * 3)
    assert fast.report().replays >= 3


def explicit():
    fast = sw.erase(lambda x: x.softmax(0))
    x = _on_mesh(_x(4, 4), sw.Shard(0))
    assert_equal(fast(x), _x(4, 4).softmax(0))
    with sw.explicit():
        try:
            fast(x)
        except sw.errors.ImplicitRedistributionError:
            return
    raise AssertionError("explicit() did not raise")


def deterministic():
    fast = sw.erase(lambda x: x + 1)
    fast(_on_mesh(_x(4)))
    torch.use_deterministic_algorithms(True)
    try:
        fast(_on_mesh(_x(4)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert fast.report().recordings == 2


# ------------------------------------------------------------------------------------ what is reached


def training():
    torch.manual_seed(0)
    model = nn.Dropout(0.5)
    fast = sw.erase(model)
    assert (full(fast(_on_mesh(_x(8, 8)))) == 0).any()
    model.eval()
    assert_equal(fast(_on_mesh(_x(8, 8))), _x(8, 8))


def attributes():
    model = nn.Dropout(0.5)
    fast = sw.erase(model)
    assert (full(fast(_on_mesh(_x(8, 8)))) == 0).any()
    model.p = 0.0
    assert_equal(fast(_on_mesh(_x(8, 8))), _x(8, 8))


def cells():
    factor = 2.0
    fast = sw.erase(lambda x: x * factor)
    assert_equal(fast(_on_mesh(_x(4))), _x(4) * 2)
    factor = 3.0
    assert_equal(fast(_on_mesh(_x(4))), _x(4) * 3)


def _times_scale(x):
    return x * SCALE


def globals_named():
    fast = sw.erase(_times_scale)
    assert_equal(fast(_on_mesh(_x(4))), _x(4) * 2)
    with mock.patch.dict(globals(), SCALE=5.0):
        assert_equal(fast(_on_mesh(_x(4))), _x(4) * 5)


FACTORS = np.ones(1, dtype="f4")
SETTINGS = types.SimpleNamespace(shift=1.0)
RECENT = collections.deque([1.0])


def _scaled_by_all(x):
    return (x * float(FACTORS[0]) + SETTINGS.shift) * RECENT[0]


def what_globals_hold():
    """Arrays by their content, namespaces, containers of the standard library."""
    fast = sw.erase(_scaled_by_all)
    assert_equal(fast(_on_mesh(_x(4))), _x(4) + 1)
    try:
        FACTORS[0] = 3
        assert_equal(fast(_on_mesh(_x(4))), _x(4) * 3 + 1)
        SETTINGS.shift = 2.0
        assert_equal(fast(_on_mesh(_x(4))), _x(4) * 3 + 2)
        RECENT[0] = 2.0
        assert_equal(fast(_on_mesh(_x(4))), _x(4) * 6 + 4)
    finally:
        FACTORS[0], SETTINGS.shift, RECENT[0] = 1, 1.0, 1.0


def learning_rates():
    plain = nn.Linear(4, 2)
    model, place = placed(plain, "batch", dist.get_world_size())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]

    def step(m, optimizer):
        def run(x):
            optimizer.zero_grad()
            m(x).sum().backward()
            optimizer.step()

        return run

    one, fast = step(plain, optimizers[0]), sw.erase(step(model, optimizers[1]))
    for lr in (0.1, 0.1, 0.1, 0.5, 0.5):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = lr
        one(_x(2, 4))
        fast(place(_x(2, 4)))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert_equal(p, q)


def replaced_parameters():
    model, place = placed(nn.Linear(4, 2), "batch", dist.get_world_size())
    fast = sw.erase(model)
    with torch.no_grad():
        fast(place(_x(2, 4)))
        model.weight = nn.Parameter(torch.zeros_like(model.weight))
        assert_equal(fast(place(_x(2, 4))), full(model.bias).expand(2, 2))


def given_other_data():
    model, place = placed(nn.Linear(4, 2), "batch", dist.get_world_size())
    fast = sw.erase(model)
    with torch.no_grad():
        fast(place(_x(2, 4)))
        model.weight.data = torch.zeros_like(model.weight)
        assert_equal(fast(place(_x(2, 4))), full(model.bias).expand(2, 2))


def frozen_parameters():
    model, place = placed(nn.Linear(4, 2), "batch", dist.get_world_size())
    fast = sw.erase(model)
    model.weight.requires_grad_(False)
    fast(place(_x(2, 4))).sum().backward()
    assert model.weight.grad is None
    assert model.bias.grad is not None
    model.weight.requires_grad_(True)
    model.zero_grad()
    fast(place(_x(2, 4))).sum().backward()
    assert_equal(model.weight.grad, _x(2, 4).sum(0).expand(2, 4))


def gradients_of_frozen_parameters():
    """They are found by themselves, not as places in the memory of another one's gradient."""
    one, frozen = nn.Parameter(_x(2)), nn.Parameter(_x(2), requires_grad=False)
    fast = sw.erase(lambda: one.grad.sum() * 10 + (0 if frozen.grad is None else frozen.grad.sum()))
    together = _x(4)
    for one.grad, frozen.grad in ((together[:2], together[2:]), (_x(4)[:2], _x(2)), (_x(4)[:2], _x(2) * 3)):
        assert_equal(fast(), one.grad.sum() * 10 + frozen.grad.sum())
    assert fast.report().replays == 2
    frozen.grad = None
    assert_equal(fast(), one.grad.sum() * 10)


def existing_gradients():
    """A backward inside adds to what is there, or makes anew."""
    plain = nn.Linear(4, 2)
    model, place = placed(plain, "batch", dist.get_world_size())

    def backward_of(m):
        def run(x):
            m(x).sum().backward()

        return run

    one, fast = backward_of(plain), sw.erase(backward_of(model))
    for clear in (False, False, False, True, False):
        if clear:
            plain.zero_grad()
            model.zero_grad()
        one(_x(2, 4))
        fast(place(_x(2, 4)))
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert_equal(p.grad, q.grad)


def loaded_states():
    plain = nn.Linear(4, 2)
    model, place = placed(plain, "batch", dist.get_world_size())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]

    def step(m, optimizer):
        def run(x):
            optimizer.zero_grad()
            m(x).sum().backward()
            optimizer.step()

        return run

    one, fast = step(plain, optimizers[0]), sw.erase(step(model, optimizers[1]))
    kept = []
    for turn in range(6):
        if turn == 1:
            kept = [copy.deepcopy(o.state_dict()) for o in optimizers]
        if turn == 4:
            for optimizer, state in zip(optimizers, kept, strict=True):
                optimizer.load_state_dict(state)
        one(_x(2, 4))
        fast(place(_x(2, 4)))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert_equal(p, q)


# ------------------------------------------------------------------------------------ the faults


@contextmanager
def _without_flag(name):
    kept = {key: ask for key, ask in surroundings.FLAGS.items() if key != name}
    with mock.patch.object(surroundings, "FLAGS", kept):
        yield


@contextmanager
def _without_facts(drop):
    whole = holds.guard_of

    def guard_of(facts, tensors, gradients):
        return whole([fact for fact in facts if not drop(fact)], tensors, gradients)

    with mock.patch.object(holds, "guard_of", guard_of):
        yield


@contextmanager
def _without_tensors():
    whole = holds.guard_of
    with mock.patch.object(holds, "guard_of", lambda facts, _, gradients: whole(facts, [], gradients)):
        yield


@contextmanager
def _without_part(position):
    """The signature of a tensor without one of its parts."""
    whole = given.of_tensor

    def of_tensor(x):
        found = list(whole(x))
        del found[position if isinstance(x, sw.DTensor) else min(position, 2)]
        return tuple(found)

    with mock.patch.object(given, "of_tensor", of_tensor):
        yield


def _patched(owner, name, value):
    return lambda: mock.patch.object(owner, name, value)


@contextmanager
def _without_overlap():
    with (
        mock.patch.object(entry, "overlap", return_value=()),
        mock.patch.object(finished, "overlap", return_value=()),
    ):
        yield


def _leaf_without_value(leaf):
    return given.of_tensor(leaf) if isinstance(leaf, torch.Tensor) else type(leaf)


def _ends_in(*names):
    return lambda: _without_facts(lambda fact: any(fact.path.endswith(name) for name in names))


CASES = {
    shapes: lambda: _without_part(1),
    layouts: lambda: _without_part(1),
    dtypes: lambda: _without_part(1),
    strides: lambda: _without_part(2),
    wants_a_gradient: lambda: _without_part(3),
    scalars: _patched(given, "_of_leaf", _leaf_without_value),
    structure: _patched(given, "taken_apart", lambda x: (sw.compat.tree_leaves(x)[:2], None)),
    shared_memory: _patched(given, "_sharing", lambda _: ()),
    shared_with_the_program: _without_overlap,
    places_of_memory: _patched(finished, "_names_places", lambda *_: False),
    grad_mode: lambda: _without_flag("grad mode"),
    autocast: lambda: _without_flag("autocast"),
    default_dtype: lambda: _without_flag("default dtype"),
    default_device: lambda: _without_flag("default device"),
    explicit: lambda: _without_flag("explicit"),
    deterministic: lambda: _without_flag("deterministic"),
    training: _ends_in(".training"),
    attributes: _ends_in(".p"),
    cells: _ends_in("<factor>"),
    what_globals_hold: lambda: _without_facts(lambda fact: fact.kind == "content"),
    globals_named: _ends_in(".SCALE"),
    learning_rates: _ends_in("['lr']"),
    replaced_parameters: _ends_in("['weight']"),
    given_other_data: _without_tensors,
    frozen_parameters: _without_tensors,
    gradients_of_frozen_parameters: _without_tensors,
    existing_gradients: _without_tensors,
    loaded_states: lambda: _without_facts(lambda fact: ".state" in fact.path or "param_groups" in fact.path),
}


def holds_true(name):
    """The case, as it is."""
    _case(name)()


def goes_red(name):
    """The case with its guard removed: the error that it ends in."""
    case = _case(name)
    with CASES[case]():
        try:
            case()
        except Exception as error:  # noqa: BLE001 - a wrong replay may end in any error
            return type(error).__name__
    return ""


def _case(name):
    return next(case for case in CASES if case.__name__ == name)

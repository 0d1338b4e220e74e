"""What a recording cannot hold: each program runs as it is, rightly, and the report names it and its line."""

import csv
import hashlib
import io
import random
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.parallel import parallelize_replicate
from shardwright.testing.meshes import rank_mesh

from .programs import assert_equal

COUNT = 0
SEEN = []


def _x():
    return torch.arange(-2.0, 6.0)


def _given():
    return sw.distribute_tensor(_x(), rank_mesh((dist.get_world_size(),), ("tp",)), {"tp": sw.Shard(0)})


def reads(x):
    return x * x.sum().item()


def decides(x):
    if x.sum().item() > 0:
        return x * 2
    return x


def selects(x):
    return x[x > 0].sum()


def lists(x):
    return x + x.tolist()[1]


def prints(x):
    print(x.shape)
    return x + 1


def times(x):
    return x + (time.time() > 0)


def draws_in_python(x):
    return x + random.random() * 0


def draws_in_numpy(x):
    return x + float(np.random.rand()) * 0  # noqa: NPY002 - what programs call


def assigns(x):
    global COUNT  # noqa: PLW0603 - what is refused
    COUNT += 1
    return x + COUNT


def appends(x):
    SEEN.append(1)
    return x + len(SEEN)


class Counter(nn.Module):
    """Counts its calls in an attribute."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.calls


def seeds(x):
    torch.manual_seed(3)
    return x + torch.zeros(())


def own_generator(x):
    return x + torch.rand((), generator=torch.Generator().manual_seed(3))


HIDDEN = torch.ones(1)


def from_outside(x):
    return x + sys.modules[__name__].__dict__["HID" + "DEN"]


def asks_for_globals(x):
    return x + len(globals()["SEEN"])


def opens(x):
    with open("/dev/null") as file:  # noqa: PTH123 - the function that programs call
        file.read()
    return x + 1


STEPS = iter(range(1000))


def takes_the_next(x):
    return x + next(STEPS)


ROWS, DIGEST = csv.writer(io.StringIO()), hashlib.sha256()


def writes_a_row(x):
    ROWS.writerow([1])
    return x + 1


def digests(x):
    DIGEST.update(b"x")
    return x + 1


class Halving:
    """What a hook belongs to."""

    by = 0.5

    def halves(self, gradients):
        return tuple(g * self.by for g in gradients)


WEIGHT = nn.Parameter(torch.ones(1))
NODE = WEIGHT.view_as(WEIGHT).grad_fn.next_functions[0][0]
NODE.register_prehook(Halving().halves)


def hooks_a_node(x):
    """Only the graph of a parameter holds the hook."""
    WEIGHT.grad = None
    WEIGHT.sum().backward()
    return x * WEIGHT.grad.item()


TOLD = np.array([{"by": 1.0}, None], dtype=object)


def reads_an_object(x):
    return x * TOLD[0]["by"]


def resizes(x):
    made = torch.zeros(2)
    made.resize_(1)
    return x + made * 0


def talks(x):
    y = torch.ones(1)
    dist.all_reduce(y)
    return x + y


def gives_an_object(x):
    return Holder(x + 1)


class Holder:
    """It holds more than a batch."""

    def __init__(self, x):
        self.x, self.by = x, gives_an_object


# Per program: what the report calls it.
REFUSED = {
    reads: "item()",
    decides: "item()",
    selects: "its result depends on values",
    lists: "reads values",
    prints: "it prints",
    times: "reads the clock",
    draws_in_python: "Python draws",
    draws_in_numpy: "Python draws",
    assigns: "the global 'COUNT'",
    appends: "SEEN: 0 -> 1",
    seeds: "generator of random numbers",
    own_generator: "generator",
    from_outside: "neither given nor found",
    opens: "opens a file",
    takes_the_next: "iterator",
    reads_an_object: "many objects",
    asks_for_globals: "asks for a global",
    writes_a_row: "a function of C",
    digests: "a function of C",
    hooks_a_node: "Halving.halves: it is not found",
    resizes: "other memory",
    talks: "beside the functional collectives",
    gives_an_object: "a result of Holder",
}


def _plain_of(program):
    """The answers of one device to four calls, from the state that the program has now."""
    global COUNT, STEPS
    wanted = [program(_x()) for _ in range(4)]
    COUNT, STEPS = 0, iter(range(1000))
    SEEN.clear()
    return wanted


def is_refused(name):
    """Four calls give one device's answers, none is a replay, and the report says why and where."""
    program = Counter() if name == "Counter" else next(p for p in REFUSED if p.__name__ == name)
    words = "calls: 0 -> 1" if name == "Counter" else REFUSED[program]
    if name == "talks":
        wanted = [_x() + dist.get_world_size()] * 4
    else:
        wanted = _plain_of(Counter() if name == "Counter" else program)
    fast = sw.erase(program)
    for answer in wanted:
        found = fast(_given())
        assert_equal(getattr(found, "x", found), getattr(answer, "x", answer))
    report = fast.report()
    assert report.recordings == report.replays == 0, str(report)
    assert words in str(report), str(report)
    if name not in _WITHOUT_A_LINE:
        assert f"{__file__}:" in str(report), str(report)
    return str(report)


_WITHOUT_A_LINE = ("reads_an_object", "Counter", "appends", "draws_in_numpy", "gives_an_object")
NAMES = ["Counter", *(program.__name__ for program in REFUSED)]


def recurs():
    """The kernel of an LSTM asks whether gradients are recorded: trained as it is, evaluated erased."""
    x, model = torch.randn(4, 5, 6), nn.LSTM(6, 8, batch_first=True)
    wanted = model(x)[0].square().sum()
    wanted.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    parallelize_replicate(model, rank_mesh((dist.get_world_size(),), ("dp",)))

    def step(x):
        model.zero_grad()
        loss = model(x)[0].square().sum() / dist.get_world_size()
        loss.backward()
        return loss.detach()

    fast, evaluate = sw.erase(step), sw.erase(lambda x: model(x)[0])
    for _ in range(4):
        torch.testing.assert_close(fast(x) * dist.get_world_size(), wanted.detach())
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), gradient)
        with torch.no_grad():
            torch.testing.assert_close(evaluate(x), model(x)[0])
    assert "does otherwise without gradients" in str(fast.report()), str(fast.report())
    assert evaluate.report().replays, str(evaluate.report())

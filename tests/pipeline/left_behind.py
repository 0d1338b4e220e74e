"""Models whose forwards leave something behind that later code reads, from some step on."""

import itertools
import random
from collections import OrderedDict

import numpy as np
import torch
from torch import nn

from tests.pipeline.own_code import Base, Block, H, Part


class State:
    aux = 0.0


class Leaves(Part):
    """Leaves a term on itself where `late` says so."""

    late = False

    def forward(self, x):
        y = super().forward(x)
        if self.late:
            self.leave(y)
        return y

    def leave(self, y):
        self.term = y.square().mean()


class ReadsLate(Base):
    def __init__(self, part=Leaves):
        super().__init__(part)

    def forward(self, x):
        x = super().forward(x)
        return x + sum(getattr(layer, "term", 0.0) for layer in self.layers)


class ReadsNothingLate(Base):
    """The same layers, and nobody reads what they leave."""

    def __init__(self):
        super().__init__(Leaves)


class InAnObject(Base):
    class Keeps(Leaves):
        def __init__(self):
            super().__init__()
            self.state = State()

        def leave(self, y):
            self.state.aux = y.square().mean()

    def __init__(self, late=False):
        super().__init__(self.Keeps)
        for layer in self.layers:
            layer.late = late

    def forward(self, x):
        x = super().forward(x)
        return x + sum(layer.state.aux for layer in self.layers)


class InATensor(InAnObject):
    """Written in place into a tensor that is no buffer."""

    class Keeps(Leaves):
        def __init__(self):
            super().__init__()
            self.stat = torch.zeros(())

        def leave(self, y):
            self.stat.copy_(y.detach().mean())

    def forward(self, x):
        x = Base.forward(self, x)
        return x + sum(layer.stat for layer in self.layers)


class OnATensor(Base):
    """A number that a layer sets on a tensor that it has; batch norm's kernel writes into another one."""

    class Notes(Part):
        def __init__(self):
            super().__init__()
            self.table, self.mean = torch.zeros(2), torch.zeros(H)

        def forward(self, x):
            self.table.factor = 2.0
            normed = torch.nn.functional.batch_norm(x, self.mean, torch.ones(H), training=True)
            return super().forward(normed)

    def __init__(self, name):
        super().__init__()
        self.layers[0], self.name = self.Notes(), name

    def forward(self, x):
        y, first = super().forward(x), self.layers[0]
        return y * getattr(first.table, "factor", 1.0) if self.name == "table" else y + first.mean


class WithinALayer(Base):
    """In a layer of a layer."""

    class Outer(Block):
        def __init__(self):
            super().__init__()
            self.inner = Leaves()

    def __init__(self):
        super().__init__(self.Outer)

    def forward(self, x):
        x = super().forward(x)
        return x + sum(
            getattr(module, "term", 0.0) for module in self.modules() if isinstance(module, Leaves)
        )


class OnAResult(Base):
    class Tells(Part):
        def forward(self, x):
            y = super().forward(x)
            y.scale = 2.0
            return y

    def __init__(self):
        super().__init__(self.Tells)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = x * getattr(x, "scale", 1.0)
        return x


class ResetBefore(Base):
    """Own code begins with a value that each layer replaces."""

    def __init__(self):
        super().__init__(Leaves)
        for layer in self.layers:
            layer.late = True

    def forward(self, x):
        for layer in self.layers:
            layer.term = 0.0
        x = super().forward(x)
        return x + sum(layer.term for layer in self.layers)


class ReadsAnotherStage(Base):
    """Only a layer that the rank of the last stage has too, in an earlier one of its stages."""

    def __init__(self):
        super().__init__(Leaves)
        self.layers[1].late = True

    def forward(self, x):
        return super().forward(x) + self.layers[1].term


class HandsOverACounter(Base):
    """Raised at the end, and handed to layers as an attribute at the beginning."""

    class Scales(Part):
        scale = 1.0

        def forward(self, x):
            return super().forward(x) * self.scale

    def __init__(self):
        super().__init__(self.Scales)
        self.n = 0

    def forward(self, x):
        for layer in self.layers:
            layer.scale = 1.0 / (1 + self.n)
        x = super().forward(x)
        self.n += 1
        return x


class KeepsForTheUser(Base):
    """What it leaves at its end it never reads."""

    def forward(self, x):
        x = super().forward(x)
        self.last = x.detach()
        return x


class SharedMemory(Base):
    """Two results in one memory: own code writes into the one, and a later layer takes the other."""

    class Two(Part):
        def forward(self, x):
            y = super().forward(x)
            return y, y[:, :]

    def __init__(self):
        super().__init__()
        self.layers[1] = self.Two()

    def forward(self, x):
        one, other = self.layers[1](self.layers[0](x))
        one.mul_(2.0)
        return self.layers[3](self.layers[2](other))


class SameMemory(SharedMemory):
    """Both in the same place: a write that each stage repeats on what it was sent."""

    def forward(self, x):
        one, _ = self.layers[1](self.layers[0](x))
        one.mul_(2.0)
        return self.layers[3](self.layers[2](one))


class WritesLate(Base):
    """In place, from some step on."""

    late = False

    def forward(self, x):
        x = self.layers[1](self.layers[0](x))
        if self.late:
            x.mul_(2.0)
        return self.layers[3](self.layers[2](x))


GENERATORS = {
    "python": (lambda: random.Random(0), lambda g, shape: torch.full(shape, g.random())),
    "numpy": (lambda: np.random.default_rng(0), lambda g, shape: torch.tensor(g.random(shape, dtype="f"))),
    "torch": (lambda: torch.Generator().manual_seed(0), lambda g, shape: torch.rand(shape, generator=g)),
}


class OwnNoise(Base):
    """The model's own code draws from a generator that the model has."""

    def __init__(self, kind):
        super().__init__()
        make, self.draw = GENERATORS[kind]
        self.rng = make()

    def forward(self, x):
        x = self.layers[1](self.layers[0](x + self.draw(self.rng, x.shape)))
        return self.layers[3](self.layers[2](x * self.draw(self.rng, x.shape)))


class LayerNoise(Base):
    """A layer draws from a generator that it has."""

    class Noisy(Part):
        def forward(self, x):
            return super().forward(x) * self.draw(self.rng, x.shape)

    def __init__(self, kind):
        super().__init__(self.Noisy)
        for layer in self.layers:
            make, layer.draw = GENERATORS[kind]
            layer.rng = make()


class Transposes(Base):
    """What a layer returns is not contiguous, and own code reads its memory in order."""

    class Turned(Part):
        def forward(self, x):
            return super().forward(x).t()

    def __init__(self):
        super().__init__()
        self.layers[1] = self.Turned()

    def forward(self, x):
        x = self.layers[1](self.layers[0](x)).t()
        return self.layers[3](self.layers[2](x.view(-1)[: x.numel()].view(x.shape)))


class Exits(Base):
    class Leaving(Part):
        late = False

        def forward(self, x):
            if self.late:
                raise SystemExit(3)
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.layers[0] = self.Leaving()


class ReadsTheStepBefore(Base):
    """What a layer has left in the forward before."""

    def __init__(self):
        super().__init__(Leaves)
        self.layers[0].late = True

    def forward(self, x):
        before = getattr(self.layers[0], "term", 0.0)
        return super().forward(x) + before


AUX, CALLS = [], 0


class Total:
    value = 0.0


class InAGlobal(Base):
    """Layers add to a list of the module's, which own code adds up."""

    class Adds(Part):
        def forward(self, x):
            y = super().forward(x)
            AUX.append(y.square().mean())
            return y

    def __init__(self):
        super().__init__(self.Adds)

    def forward(self, x):
        AUX.clear()
        x = super().forward(x)
        return x + sum(AUX)


class Makes(OrderedDict):
    """Makes a module of a class when it is asked, as the table of activations of `transformers` does."""

    def __getitem__(self, name):
        return super().__getitem__(name)()


class MakesEach(list):
    def __iter__(self):
        return (each() for each in super().__iter__())


ACTIVATIONS, EACH = Makes(silu=nn.SiLU, softplus=nn.Softplus), MakesEach([nn.SiLU, nn.Tanh])


class MakesWhatItReads(Base):
    """Layers and own code ask containers that make something else of what they hold."""

    class Asks(Part):
        def forward(self, x):
            x = ACTIVATIONS["silu"](super().forward(x))
            for part in EACH:
                x = part(x)
            return x

    def __init__(self):
        super().__init__(self.Asks)

    def forward(self, x):
        return ACTIVATIONS["softplus"](super().forward(x)) * len(EACH)


def _note(y):
    Total.value = Total.value + y.square().mean()


class OnAClass(Base):
    """The same on a class, in functions that both name."""

    class Adds(Part):
        def forward(self, x):
            y = super().forward(x)
            _note(y)
            return y

    def __init__(self):
        super().__init__(self.Adds)

    def begun(self):
        Total.value = 0.0

    def forward(self, x):
        self.begun()
        return super().forward(x) + Total.value


class Counted(Part):
    """What a class that inherits it counts stands in that class from the first call on."""

    calls = 0

    def forward(self, x):
        type(self).calls = type(self).calls + 1
        return super().forward(x)


class OnAClassThatInherits(Base):
    """The same on a class that has inherited what it changes."""

    class Counts(Counted):
        pass

    def __init__(self):
        super().__init__(self.Counts)

    def forward(self, x):
        return super().forward(x) * (1 + self.Counts.calls)


class InSlots(Base):
    """The same in an object that has slots."""

    class Slotted:
        __slots__ = ("aux",)

    class Keeps(Part):
        def __init__(self):
            super().__init__()
            self.state = InSlots.Slotted()

        def forward(self, x):
            y = super().forward(x)
            self.state.aux = y.square().mean()
            return y

    def __init__(self):
        super().__init__(self.Keeps)

    def forward(self, x):
        x = super().forward(x)
        return x + sum(layer.state.aux for layer in self.layers)


class CountsItsCalls(Base):
    """Nobody else reads what layers count."""

    class Counts(Part):
        def forward(self, x):
            global CALLS  # noqa: PLW0603  what is tried
            CALLS += 1
            return super().forward(x)

    def __init__(self):
        super().__init__(self.Counts)


def _ramp():
    yield from itertools.count(1)


class Advances(Base):
    """What layers multiply by stands in a place of its own, and goes on by one at each call."""

    class Counts(Part):
        def __init__(self):
            super().__init__()
            self.raw = bytearray(b"\0")

        def forward(self, x):
            return super().forward(x) * self.next()

        def next(self):
            if self.kind == "bytearray":
                self.raw[0] += 1
                return self.raw[0]
            self.linear.weight.calls = getattr(self.linear.weight, "calls", 0) + 1
            return self.linear.weight.calls if self.kind == "parameter" else next(self.numbers)

    def __init__(self, kind):
        super().__init__(self.Counts)
        for layer in self.layers:
            layer.kind = kind
            if kind in ITERATORS:
                layer.numbers = ITERATORS[kind]()


ITERATORS = {"count": lambda: itertools.count(1), "generator": _ramp, "list": lambda: iter([1] * 9)}


class FitsOnce(Base):
    """Layers whose first batch gives some of their parameters their values, in one of several ways."""

    class Fits(Part):
        def __init__(self):
            super().__init__()
            self.scale, self.shift = (nn.Parameter(torch.full((H,), v)) for v in (1.0, 0.25))
            self.register_buffer("fitted", torch.tensor(False))

        def forward(self, x):
            if not self.fitted:
                FITS[self.kind](self, 1 + x.detach().square().mean(0), x.detach().mean(0))
                self.fitted.fill_(True)
            return super().forward(x) * self.scale + self.shift

    def __init__(self, kind):
        super().__init__(self.Fits)
        for layer in self.layers:
            layer.kind = kind


def _in_place(layer, scale, shift):
    with torch.no_grad():
        layer.scale.mul_(scale)
        layer.shift[1:].sub_(shift[1:])


def _through_data(layer, scale, shift):
    layer.scale.data.mul_(scale)
    torch._foreach_add_([layer.shift.detach()], [shift])


def _other_memory(layer, scale, shift):
    layer.scale.data = layer.scale.data * scale
    layer.shift.data = layer.shift.data + shift


def _by_out(layer, scale, shift):
    torch.mul(layer.scale.data, scale, out=layer.scale.data)
    nn.init.constant_(layer.shift, float(shift.sum()))


FITS = {"in place": _in_place, "data": _through_data, "other memory": _other_memory, "out": _by_out}


class HooksOnce(Base):
    """At their first call layers put a hook in place, and take one away."""

    class Hooks(Part):
        def __init__(self):
            super().__init__()
            self.first = True
            self.handle = self.linear.register_forward_pre_hook(lambda _, args: (2 * args[0],))

        def forward(self, x):
            y = super().forward(x)
            if self.first:
                self.linear.register_forward_hook(lambda _, __, out: 1.5 * out)
                self.handle.remove()
                self.first = False
            return y

    def __init__(self):
        super().__init__(self.Hooks)

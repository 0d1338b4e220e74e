"""Models whose own code reads or leaves more than tensors that cross a border."""

import random

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

H = 8


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Base(nn.Module):
    def __init__(self, part=Part):
        super().__init__()
        self.layers = nn.ModuleList(part() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Stops(Base):
    """The last part asks those before it for no gradient."""

    class Detaches(Part):
        def forward(self, x):
            return super().forward(x.detach())

    def __init__(self):
        super().__init__()
        self.layers[3] = self.Detaches()


class ReturnsAFloat(Base):
    """A number that data decides divides on the other side of the cut."""

    class Scaled(Part):
        def forward(self, x):
            y = self.linear(x)
            return y, float(y.detach().abs().max())

    def __init__(self):
        super().__init__()
        self.layers[1] = self.Scaled()

    def forward(self, x):
        x, scale = self.layers[1](self.layers[0](x))
        return self.layers[3](self.layers[2](x / scale))


class Routes(Base):
    """Own code picks rows by the values of an activation, and puts what layers make of them back."""

    def forward(self, x):
        x = self.layers[0](x)
        rows = torch.where(x[:, 0] > 0)[0]
        for layer in self.layers[1:]:
            x = x.index_add(0, rows, layer(x[rows]))
        return x


class ReturnsAnInt(Base):
    class Counts(Part):
        def forward(self, x):
            y = self.linear(x)
            return y, int((y > 0).sum())

    def __init__(self):
        super().__init__()
        self.layers[1] = self.Counts()

    def forward(self, x):
        x, count = self.layers[1](self.layers[0](x))
        return self.layers[3](self.layers[2](x * (1 + count)))


class AsksTheClass(nn.Module):
    """A residual around one class of layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Part(), nn.Linear(H, H), Part(), nn.Linear(H, H)])

    def forward(self, x):
        for layer in self.layers:
            y = layer(x)
            x = x + y if isinstance(layer, nn.Linear) else y
        return x


class AsksTheType(AsksTheClass):
    """The same, by a test that nothing that stands in for a layer can pass."""

    def forward(self, x):
        for layer in self.layers:
            y = layer(x)
            x = x + y if type(layer) is nn.Linear else y
        return x


class TypeWithoutFunctions(AsksTheClass):
    """Other layers are called, and nothing else is."""

    def forward(self, x):
        for layer in self.layers:
            if type(layer) is Part:
                x = layer(x)
        return self.layers[3](x)


class Zero(nn.Module):
    """Its result is zero where both sides of the cut have the same random numbers."""

    def __init__(self, draw):
        super().__init__()
        self.first, self.second = nn.Linear(H, H), nn.Linear(H, H)
        for layer in (self.first, self.second):
            nn.init.eye_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.draw, self.drop = draw, nn.Dropout(0.5)

    def forward(self, x):
        y = self.first(x)
        noise = _drawn(self.draw, y, self.drop)
        return self.second(y + noise) - noise - y


def _drawn(draw, y, drop):
    if draw == "torch":
        return torch.randn(y.shape)
    if draw == "dropout":
        return drop(y)
    if draw == "after a mask of what is not here":
        drop(y)
        return torch.randn(y.shape)
    if draw == "python":
        return torch.full(y.shape, random.random())
    raise AssertionError(draw)


class ReplacesABuffer(Base):
    class Mean(Part):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
            return self.linear(x) + self.mean

    def __init__(self):
        super().__init__(self.Mean)


class Counts(Base):
    """Attributes of every kind that a forward leaves."""

    class Counting(Part):
        calls = 0

        def __init__(self):
            super().__init__()
            self.seen, self._cache = [], None

        def forward(self, x):
            self.calls += 1
            self.seen.append(1)
            if not hasattr(self, "first"):
                self.first = x.detach().mean()
            if self._cache is None:
                self._cache = x.detach().max()
            return self.linear(x) / (self.calls + len(self.seen)) + self.first + self._cache

    def __init__(self):
        super().__init__(self.Counting)


class Adds(Base):
    """Written in place: the sum over all layers begins as a tensor that every stage has."""

    def forward(self, x):
        total = torch.zeros(x.shape)
        for layer in self.layers:
            x = layer(x)
            total += x
        return total


class Catches(Base):
    def forward(self, x):
        for layer in self.layers:
            try:
                x = layer(x)
            except Exception:  # noqa: BLE001  what is tested
                x = x * 0
        return x


class WritesItsArgument(Base):
    def forward(self, x):
        x.mul_(0.5)
        return super().forward(x)


class Unused(nn.Module):
    """Tied weights that a forward without `aux` does not use, and a frozen pair beside them."""

    def __init__(self):
        super().__init__()
        self.a, self.u, self.f = (nn.Linear(H, H) for _ in range(3))
        self.b, self.v, self.g = (nn.Linear(H, H) for _ in range(3))
        self.v.weight, self.g.weight = self.u.weight, self.f.weight
        self.f.weight.requires_grad_(False)

    def forward(self, x, aux=False):
        x = self.f(self.a(x))
        if aux:
            x = self.u(x)
        x = self.g(self.b(x))
        return self.v(x) if aux else x


class SharedNorm(Base):
    class Normed(Part):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(H)

        def forward(self, x):
            return x + self.norm(self.linear(x))

    def __init__(self):
        super().__init__(self.Normed)
        self.layers[3] = self.layers[1]


class CountsAbove(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        return super().forward(x)


class CountsAtTheEnd(CountsAbove):
    def forward(self, x):
        x = Base.forward(self, x)
        self.steps += 1
        return x


class LeavesOnItself(Base):
    """A term of the loss that each layer leaves on itself; before it runs, there is another."""

    class Leaves(Part):
        def __init__(self):
            super().__init__()
            self.term = 0.0

        def forward(self, x):
            y = super().forward(x)
            self.term = y.square().mean()
            return y

    def __init__(self):
        super().__init__(self.Leaves)

    def forward(self, x):
        return super().forward(x) + sum(layer.term for layer in self.layers)


class CallsForward(Base):
    def forward(self, x):
        for layer in self.layers:
            x = layer.forward(x)
        return x


class Branches(Base):
    """The last layer is given more where an argument, an attribute or the rank says so."""

    use = False

    def forward(self, x, flag=None):
        first = self.layers[0](x)
        y = self.layers[2](self.layers[1](first))
        if self.use or (flag is not None and flag.any()):
            y = y + first
        return self.layers[3](y)


class Scales(Base):
    """An attribute that the training loop changes."""

    scale = 1.0

    def forward(self, x):
        return super().forward(x * self.scale)


def total(out, _):
    """The loss: a sum over rows."""
    return out.square().sum()


class Aux(Part):
    """A layer inside of a block that keeps a loss of its own."""

    def forward(self, x):
        y = super().forward(x)
        self.aux = y.square().mean()
        return y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Aux()

    def forward(self, x):
        return self.inner(x)


class WalksOverModules(Base):
    def __init__(self):
        super().__init__(Block)

    def forward(self, x):
        x = super().forward(x)
        return x + sum(module.aux for module in self.modules() if isinstance(module, Aux))


class WalksOverParameters(Base):
    def forward(self, x):
        return super().forward(x) + sum(p.square().sum() for p in self.parameters())


class CountsParameters(Base):
    """Sizes are known everywhere, and so is a dtype."""

    def forward(self, x):
        x = x.to(next(self.layers[0].parameters()).dtype)
        return super().forward(x) / sum(p.numel() for p in self.parameters())


class WritesIntoADict(Base):
    class Keeps(Part):
        def __init__(self):
            super().__init__()
            self.state = {"aux": 0.0}

        def forward(self, x):
            y = super().forward(x)
            self.state["aux"] = y.square().mean()
            return y

    def __init__(self):
        super().__init__(self.Keeps)

    def forward(self, x):
        return super().forward(x) + sum(layer.state["aux"] for layer in self.layers)


class FillsAListOfTheModel(Base):
    class Appends(Part):
        def forward(self, x):
            y = super().forward(x)
            self.sink.append(y.square().mean())
            return y

    def __init__(self):
        super().__init__(self.Appends)
        self.sink = []
        for layer in self.layers:
            layer.sink = self.sink

    def forward(self, x):
        self.sink.clear()
        return super().forward(x) + sum(self.sink)


class AsksForAGradient(Base):
    def forward(self, x):
        x = self.layers[0](x)
        factor = 2.0 if x.requires_grad else 1.0
        return self.layers[3](self.layers[2](self.layers[1](x)) * factor)


class Box:
    """What torch does not look into."""


class HandsOverAnObject(Base):
    class Adds(Part):
        def forward(self, x, box):
            y = super().forward(x).clone()
            y += getattr(box, "memory", 0.0)
            return y

    def __init__(self):
        super().__init__(self.Adds)

    def forward(self, x):
        box = Box()
        for at, layer in enumerate(self.layers):
            x = layer(x, box)
            if at == 0:
                box.memory = x
        return x


class SetsAnAttribute(Base):
    class Adds(Part):
        memory = None

        def forward(self, x):
            y = super().forward(x).clone()
            if self.memory is not None:
                y += self.memory
            return y

    def __init__(self):
        super().__init__(self.Adds)

    def forward(self, x):
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            layer.memory = first
            x = layer(x)
            layer.memory = None
        return x


class DiffersInForward(Base):
    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = super().forward(x)
            (slope,) = torch.autograd.grad(y.square().sum() + (x**3).sum(), x, create_graph=True)
        return y + slope


class HasAGenerator(Base):
    def __init__(self):
        super().__init__()
        self.draws = torch.Generator()

    def __deepcopy__(self, memo):
        return type(self)()

    def forward(self, x):
        x = super().forward(x + torch.randn(x.shape, generator=self.draws))
        return x + torch.randn(x.shape, generator=self.draws)


class HooksAnActivation(Base):
    """A hook that halves a gradient, on what crosses the border."""

    def forward(self, x):
        for at, layer in enumerate(self.layers):
            x = layer(x)
            if at == 1 and torch.is_grad_enabled():
                x.register_hook(lambda gradient: 0.5 * gradient)
        return x


class DrawsAroundCheckpoints(Base):
    class Drops(Part):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x), 0.5)

    def __init__(self):
        super().__init__(self.Drops)

    def forward(self, x):
        x = nn.functional.dropout(x, 0.1)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class AsksALayerElsewhere(Base):
    """In which mode a child of it is."""

    def forward(self, x):
        factor = 2.0 if self.layers[0].linear.training else 1.0
        return super().forward(x) * factor


class AsksWhetherGradientsAreRecorded(Base):
    """A layer that hands a term on in training alone, and own code that does as it."""

    class Term(Part):
        def forward(self, x):
            y = super().forward(x)
            return (y, y.square().mean()) if torch.is_grad_enabled() else (y, None)

    def __init__(self):
        super().__init__()
        self.layers[0] = self.Term()

    def forward(self, x):
        x, term = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x)
        return x if term is None else x + term


class DiffersInALayer(Base):
    """A layer that asks for the slope of what it makes, one that hooks its argument, one with a backward."""

    class Slope(Part):
        def forward(self, x):
            y = super().forward(x)
            return y + torch.autograd.grad(y.square().sum(), self.linear.bias, create_graph=True)[0]

    class Hooks(Part):
        def forward(self, x):
            if torch.is_grad_enabled():
                x.register_hook(lambda gradient: 0.5 * gradient)
            return super().forward(x)

    class Backward(Part):
        def forward(self, x):
            y = super().forward(x.detach())
            if torch.is_grad_enabled():
                (0.1 * y.square().sum()).backward()
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.layers[0], self.layers[2], self.layers[3] = self.Slope(), self.Hooks(), self.Backward()


class WritesIntoResults(Base):
    """Own code changes the dicts that layers return, by a way of each layer."""

    class Gives(Part):
        def forward(self, x):
            return {"h": super().forward(x)}

    def __init__(self):
        super().__init__(self.Gives)

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            out = layer(x)
            if number == 0:
                x = out.pop("h")
            elif number == 1:
                out["h"] = list(out["h"].split(H // 2, -1))
                x = torch.cat(out["h"], -1)
            else:
                out["more"] = out["h"] + 1
                x = out["more"] - 1
        return x

"""Views: reshapes, slices, permutations, parts, diagonals, windows, expands."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from tests.fuzz.program import Ref
from tests.fuzz.scope import Nope, Scope, kind_of

_View = Callable[[Scope, Ref], list[Ref]]


def take_view(s: Scope, x: Ref) -> Ref:
    """Some view of x; of several, one."""
    return s.rng.choice(s.rng.choices(list(VIEWS), list(VIEWS.values()))[0](s, x))


def views(s: Scope) -> None:
    """One view, or a chain of two."""
    x = take_view(s, s.pick("fcib"))
    if s.chance(0.3):
        take_view(s, x)


def _slice(s: Scope, x: Ref) -> list[Ref]:
    index = draw_slices(s, s[x])
    return s.do("[]", x, index if len(index) != 1 else index[0], form="view")


def draw_slices(s: Scope, x: torch.Tensor) -> tuple[object, ...]:
    """Basic indices: slices with steps, integers, None, an ellipsis."""
    if not x.dim():
        return (None,) if s.chance(0.5) else (...,)
    index: list[object] = []
    for size in x.shape[: s.rng.randint(1, x.dim())]:
        roll = s.rng.random()
        if roll < 0.2 and size:
            index.append(s.rng.randrange(-size, size))
        elif roll < 0.45:
            index.append(slice(None))
        else:
            start = s.rng.randint(0, size)
            stop = s.rng.randint(start, size)
            step = s.rng.choice((None, None, 2, 3))
            index.append(
                slice(s.rng.choice((None, start)), s.rng.choice((None, stop, stop - size or None)), step)
            )
    if s.chance(0.1):
        index.insert(s.rng.randint(0, len(index)), None)
    if s.chance(0.1):
        index.insert(0 if len(index) < x.dim() and s.chance(0.5) else len(index), ...)
    return tuple(index)


def _shape_of(s: Scope, numel: int) -> list[int]:
    """A shape with this many elements."""
    shape: list[int] = []
    left = numel
    for _ in range(s.rng.randint(0, 3)):
        divisors = [d for d in range(1, left + 1) if left % d == 0] if left else [0]
        d = s.rng.choice(divisors)
        shape.append(d)
        left = left // d if d else 0
    shape.insert(s.rng.randint(0, len(shape)), left) if left != 1 or not shape else None
    if numel and shape and s.chance(0.25):
        shape[s.rng.randrange(len(shape))] = -1
    return shape


def _view(s: Scope, x: Ref) -> list[Ref]:
    name = s.rng.choice((".view", ".reshape"))
    return s.do(name, x, *_shape_of(s, s[x].numel()), form="view")


def _transpose(s: Scope, x: Ref) -> list[Ref]:
    t = s[x]
    name = s.rng.choice((".transpose", ".swapaxes", ".movedim"))
    return s.do(name, x, s.dims(t), s.dims(t), form="view")


def _permute(s: Scope, x: Ref) -> list[Ref]:
    order = list(range(s[x].dim()))
    s.rng.shuffle(order)
    return s.do(".permute", x, *order, form="view") if order else s.do(".permute", x, (), form="view")


def _unsqueeze(s: Scope, x: Ref) -> list[Ref]:
    return s.do(".unsqueeze", x, s.rng.randint(0, s[x].dim()), form="view")


def _squeeze(s: Scope, x: Ref) -> list[Ref]:
    args = () if s.chance(0.4) else (s.dims(s[x]),)
    return s.do(".squeeze", x, *args, form="view")


def _select(s: Scope, x: Ref) -> list[Ref]:
    dim = s.dims(s[x])
    if not s[x].shape[dim]:
        raise Nope
    return s.do(".select", x, dim, s.rng.randrange(s[x].shape[dim]), form="view")


def _narrow(s: Scope, x: Ref) -> list[Ref]:
    dim = s.dims(s[x])
    start = s.rng.randint(0, s[x].shape[dim])
    return s.do(".narrow", x, dim, start, s.rng.randint(0, s[x].shape[dim] - start), form="view")


def _expand(s: Scope, x: Ref) -> list[Ref]:
    t = s[x]
    shape = [
        s.rng.choice((2, 3)) if size == 1 and s.chance(0.8) else s.rng.choice((size, -1)) for size in t.shape
    ]
    new = [s.rng.choice((1, 2, 3)) for _ in range(s.rng.choice((0, 0, 1)))]
    return s.do(".expand", x, *new, *shape, form="view")


def _parts(s: Scope, x: Ref) -> list[Ref]:
    dim = s.dims(s[x])
    size = s[x].shape[dim]
    kind = s.rng.choice(("chunk", "split", "split sizes", "unbind", "tensor_split"))
    if kind == "unbind":
        return _few(s.do(".unbind", x, dim, form="view"))
    if kind == "split sizes":
        at = s.rng.randint(0, size)
        return s.do(".split", x, [at, size - at], dim, form="view")
    if kind == "split":
        return _few(s.do(".split", x, max(s.rng.randint(size // 3, size), 1), dim, form="view"))
    return _few(s.do(f".{kind}", x, s.rng.randint(1, 4), dim, form="view"))


def _few(found: list[Ref]) -> list[Ref]:
    if len(found) > 8:
        raise Nope
    return found


def _diagonal(s: Scope, x: Ref) -> list[Ref]:
    if s[x].dim() < 2:
        raise Nope
    one, two = s.rng.sample(range(s[x].dim()), 2)
    return s.do(".diagonal", x, s.rng.randint(-1, 2), one, two, form="view")


def _unfold(s: Scope, x: Ref) -> list[Ref]:
    dim = s.dims(s[x])
    size = s.rng.randint(1, max(min(3, s[x].shape[dim]), 1))
    return s.do(".unfold", x, dim, size, s.rng.randint(1, 3), form="view")


def _flatten(s: Scope, x: Ref) -> list[Ref]:
    if not s[x].dim():
        return s.do(".flatten", x, form="view")
    start = s.rng.randrange(s[x].dim())
    return s.do(".flatten", x, start, s.rng.randrange(start, s[x].dim()), form="view")


def _unflatten(s: Scope, x: Ref) -> list[Ref]:
    dim = s.dims(s[x])
    size = s[x].shape[dim]
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    if not divisors:
        raise Nope
    d = s.rng.choice(divisors)
    return s.do(".unflatten", x, dim, (d, s.rng.choice((size // d, -1))), form="view")


def _attribute(s: Scope, x: Ref) -> list[Ref]:
    names = [".mT", ".mH"] if s[x].dim() >= 2 else [".T"]
    if s[x].dim() == 2:
        names += [".T", ".H"]
    if kind_of(s[x]) == "c":
        names = [".real", ".imag", *names]
    return s.do(s.rng.choice(names), x, form="attribute")


def _complex(s: Scope, x: Ref) -> list[Ref]:
    if kind_of(s[x]) == "c":
        return s.do(s.rng.choice(("torch.view_as_real", ".conj")), x, form="view")
    if kind_of(s[x]) == "f" and s[x].dim() and s[x].shape[-1] == 2:
        return s.do("torch.view_as_complex", x, form="view")
    raise Nope


def _bytes(s: Scope, x: Ref) -> list[Ref]:
    if kind_of(s[x]) not in "fi" or s[x].requires_grad:
        raise Nope
    return s.do(".view", x, s.rng.choice((torch.int32, torch.int16, torch.int64)), form="view")


def _detach(s: Scope, x: Ref) -> list[Ref]:
    return (
        s.do(s.rng.choice((".detach", ".view_as")), x, *(), form="view")
        if s.chance(0.6)
        else s.do(".view_as", x, x, form="view")
    )


def _strided(s: Scope, x: Ref) -> list[Ref]:
    t = s[x]
    if t.numel() < 4 or not t.is_contiguous():
        raise Nope
    rows = s.rng.randint(1, 3)
    columns = s.rng.randint(1, t.numel() // rows)
    strides = (s.rng.choice((columns, 1, t.numel() // rows)), 1)
    return s.do(".as_strided", x, (rows, columns), strides, form="view")


VIEWS: dict[_View, float] = {
    _slice: 5, _view: 4, _transpose: 2, _permute: 1.5, _unsqueeze: 1, _squeeze: 1, _select: 1.5, _narrow: 1.5,
    _expand: 2.5, _parts: 2.5, _diagonal: 1, _unfold: 1, _flatten: 1, _unflatten: 1, _attribute: 1.5,
    _complex: 0.7, _bytes: 0.2, _detach: 1, _strided: 0.2,
}  # fmt: skip
shape_of = functools.partial(_shape_of)

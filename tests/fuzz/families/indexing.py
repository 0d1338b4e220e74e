"""Reads and writes by index, and joins."""

from __future__ import annotations

from typing import Any

import torch

from tests.fuzz.families.forms import into, target
from tests.fuzz.families.pointwise import mask_for
from tests.fuzz.families.views import draw_slices
from tests.fuzz.program import Ref
from tests.fuzz.scope import Nope, Scope


def _index(s: Scope, size: int, shape: tuple[int, ...]) -> Ref:
    if not size:
        raise Nope
    return s.leaf(shape, torch.int64, f"index {size}")


def _lines(s: Scope) -> tuple[int, ...]:
    return s.rng.choice(((3,), (2,), (5,), (2, 2), (1,)))


def read(s: Scope) -> None:
    """Advanced indices, gather, index_select, take."""
    name = s.rng.choice(("[]", "[]", "[]", "index_select", "gather", "take", "take_along_dim"))
    x = s.pick("fcib", dims=1)
    t = s[x]
    dim = s.dims(t)
    if name == "[]":
        s.do("[]", x, advanced(s, t), form="index")
    elif name == "index_select":
        args = (x, dim, _index(s, t.shape[dim], (s.rng.randint(1, 5),)))
        if s.chance(0.2):
            into(s, "torch.index_select", *args)
        else:
            s.do("torch.index_select", *args)
    elif name == "take":
        s.do("torch.take", x, _index(s, t.numel(), _lines(s)))
    else:
        shape = tuple(s.rng.randint(1, max(size, 1)) if d != dim % t.dim() else s.rng.randint(1, 5)
                      for d, size in enumerate(t.shape))  # fmt: skip
        if name == "take_along_dim":
            shape = tuple(size if d != dim % t.dim() else 3 for d, size in enumerate(t.shape))
            s.do("torch.take_along_dim", x, _index(s, t.shape[dim], shape), dim)
        else:
            s.do("torch.gather", x, dim, _index(s, t.shape[dim], shape))


def advanced(s: Scope, t: torch.Tensor) -> tuple[Any, ...]:
    """An index with at least one tensor in it."""
    index: list[Any] = []
    shape = _lines(s)
    at = s.rng.randrange(t.dim())
    for d, size in enumerate(t.shape):
        if d == at or s.chance(0.25):
            index.append(_index(s, size, shape if s.chance(0.8) else shape[-1:]))
        elif s.chance(0.2) and size:
            index.append(s.rng.randrange(size))
        else:
            start = s.rng.choice((None, 0, 1))
            index.append(slice(start, None) if s.chance(0.3) else slice(None))
        if d >= at and s.chance(0.4):
            break
    return tuple(index)


def write(s: Scope) -> None:
    """Writes by slices, masks and indices."""
    s.rng.choices(
        (_set_slices, _set_mask, _set_index, _scatter, _index_op, _fill, _copy, _masked_scatter),
        (4, 1.5, 2, 2.5, 2.5, 2, 2, 0.5),
    )[0](s)


def _written(s: Scope, dims: int = 0) -> tuple[Ref, str]:
    form = "through a view" if s.chance(0.4) else "in place"
    return target(s, form, "fcib" if s.chance(0.3) else "fc", dims), form


def _value(s: Scope, x: torch.Tensor, part: torch.Tensor) -> Any:
    if s.chance(0.35):
        return True if x.dtype == torch.bool else s.rng.choice((0, 1, 2, -1 if x.dtype != torch.uint8 else 3))
    return s.broadcast(part.detach()) if s.chance(0.5) else s.partner(part.detach())


def _set_slices(s: Scope) -> None:
    x, _ = _written(s)
    index: Any = draw_slices(s, s[x])
    index = index if len(index) != 1 else index[0]
    part = s.trial("[]", x, index)
    s.do("[]=", x, index, _value(s, s[x], part), form="setitem", result=False)


def _set_mask(s: Scope) -> None:
    x, _ = _written(s, 1)
    mask = mask_for(s, s[x])
    value = s.rng.choice((0, 2)) if s.chance(0.8) else s.leaf((), s[x].dtype, grad=False)
    s.do("[]=", x, mask, value, form="setitem", result=False)


def _set_index(s: Scope) -> None:
    x, _ = _written(s, 1)
    index = advanced(s, s[x])
    value = _value(s, s[x], s.trial("[]", x, index))
    accumulate = s.chance(0.3) and all(isinstance(i, Ref) for i in index) and isinstance(value, Ref)
    if accumulate:
        s.do(".index_put_", x, index, value, True, form="in place", result=False)
        return
    if isinstance(value, Ref) and _repeats(s, index):
        raise Nope  # which of equals stays is nobody's promise
    s.do("[]=", x, index, value, form="setitem", result=False)


def _repeats(s: Scope, index: tuple[Any, ...]) -> bool:
    found = [s[i].flatten() for i in index if isinstance(i, Ref)]
    return any(len(set(i.tolist())) < i.numel() for i in found)


def _scatter(s: Scope) -> None:
    name = s.rng.choice(("scatter_add", "scatter_add", "scatter", "scatter_reduce"))
    form = s.rng.choice(("plain", "in place", "through a view", "method", "out="))
    x = target(s, form, "f", 1)
    t = s[x]
    dim = s.dims(t)
    shape = tuple(s.rng.randint(1, max(size, 1)) for size in t.shape)
    if name == "scatter":  # no index twice
        line = s.leaf((t.shape[dim],), torch.int64, f"permutation {t.shape[dim]}")
        sizes = [-1 if d == dim % t.dim() else 1 for d in range(t.dim())]
        (index,) = s.do(".expand", s.do(".view", line, *sizes, form="view")[0], *t.shape, form="view")
        rest: tuple[Any, ...] = (s.partner(t),) if s.chance(0.7) else (1.5,)
    else:
        index = _index(s, t.shape[dim], shape)
        rest = (s.partner(t, shape),)
    kwargs: dict[str, Any] = {}
    if name == "scatter_reduce":
        rest = (*rest, s.rng.choice(("sum", "amax", "amin", "mean", "prod")))
        kwargs = {"include_self": s.chance(0.7)}
    _in_form(s, name, form, x, dim, index, *rest, **kwargs)


def _in_form(s: Scope, name: str, form: str, x: Ref, *rest: Any, **kwargs: Any) -> None:
    if form in {"in place", "through a view"}:
        s.do(f".{name}_", x, *rest, form=form, result=False, **kwargs)
    elif form == "out=" and not kwargs:
        into(s, f"torch.{name}", x, *rest)
    else:
        s.do(
            f"torch.{name}" if form == "plain" else f".{name}",
            x,
            *rest,
            form=form.replace("out=", "method"),
            **kwargs,
        )


def _index_op(s: Scope) -> None:
    name = s.rng.choice(("index_add", "index_copy", "index_fill", "index_add"))
    form = s.rng.choice(("plain", "in place", "through a view", "method"))
    x = target(s, form, "fci", 1)
    t = s[x]
    dim = s.dims(t)
    if name == "index_copy":
        index = s.leaf((t.shape[dim],), torch.int64, f"permutation {t.shape[dim]}")
    else:
        index = _index(s, t.shape[dim], (s.rng.randint(1, 4),))
    if name == "index_fill":
        return _in_form(s, name, form, x, dim, index, s.rng.choice((0, 2)))
    shape = list(t.shape)
    shape[dim] = s[index].numel()
    kwargs = {"alpha": 2} if name == "index_add" and s.chance(0.3) else {}
    return _in_form(s, name, form, x, dim, index, s.partner(t, tuple(shape)), **kwargs)


def _fill(s: Scope) -> None:
    x, form = _written(s)
    name = s.rng.choice(("fill_", "zero_", "fill_diagonal_", "fill_"))
    args = () if name == "zero_" else (s.rng.choice((0, 1, 3)),)
    s.do(f".{name}", x, *args, form=form, result=False)


def _copy(s: Scope) -> None:
    x, form = _written(s)
    y = s.broadcast(s[x].detach()) if s.chance(0.8) else s.pick("fi")
    s.do(".copy_", x, y, form=form, result=False)


def _masked_scatter(s: Scope) -> None:
    x, form = _written(s, 1)
    # A source of its own: torch reads one that it is writing, in an order that nobody states.
    source = s.leaf(tuple(s[x].shape), s[x].dtype, grad=False)
    s.do(".masked_scatter_", x, mask_for(s, s[x]), source, form=form, result=False)


def join(s: Scope) -> None:
    """cat, stack and their like."""
    name = s.rng.choice(("cat", "cat", "stack", "hstack", "vstack"))
    x = s.pick("fcib", dims=1)
    t = s[x]
    dim = s.dims(t)
    shape = list(t.shape)
    if name == "cat":
        shape[dim] = s.rng.randint(0, 4)
    other = s.partner(t, tuple(shape)) if name in {"cat", "stack"} else s.partner(t)
    if s.chance(0.15):
        other = s.pick("fib", where=lambda y: y.shape == s[other].shape)
    members = [x, other, *([s.partner(t)] if s.chance(0.3) else [])]
    s.rng.shuffle(members)
    args: tuple[Any, ...] = (members, dim) if name in {"cat", "stack"} else (members,)
    if s.chance(0.2):
        into(s, f"torch.{name}", *args)
    else:
        s.do(f"torch.{name}", *args)


def rearrange(s: Scope) -> None:
    """Copies that move elements: roll, flip, repeat, diagonals."""
    name = s.rng.choice(("roll", "flip", "repeat", "tile", "repeat_interleave", "diag_embed", "diag", "rot90",
                         "block_diag", "meshgrid", "diff", "trace", "swapdims_copy"))  # fmt: skip
    x = s.pick("fci", dims=1)
    t = s[x]
    if name == "roll":
        args = (s.rng.randint(-2, 3), s.dims(t)) if s.chance(0.7) else (s.rng.randint(-2, 3),)
        s.do("torch.roll", x, *args)
    elif name == "flip":
        s.do("torch.flip", x, s.rng.sample(range(t.dim()), s.rng.randint(1, t.dim())))
    elif name in {"repeat", "tile"}:
        s.do(f".{name}", x, *[s.rng.randint(1, 2) for _ in t.shape], form="method")
    elif name == "repeat_interleave":
        s.do("torch.repeat_interleave", x, s.rng.randint(1, 3), s.dims(t))
    elif name == "rot90":
        s.do("torch.rot90", x, s.rng.randint(1, 3), [0, 1])
    elif name == "diff":
        s.do("torch.diff", x, dim=s.dims(t))
    elif name == "block_diag":
        s.do("torch.block_diag", x, s.leaf((2, 2), t.dtype))
    elif name == "meshgrid":
        s.do("torch.meshgrid", x, s.leaf((2,), t.dtype), indexing="ij")
    elif name == "diag_embed":
        s.do("torch.diag_embed", x)
    else:
        s.do(f"torch.{name}", x) if name != "swapdims_copy" else s.do(
            "torch.transpose_copy", x, s.dims(t), s.dims(t)
        )

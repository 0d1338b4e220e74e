"""The forms of one op: plain, method, in place, `out=`, list, and in place through a view."""

from __future__ import annotations

from typing import Any

import torch

from tests.fuzz.families.views import take_view
from tests.fuzz.program import Ref
from tests.fuzz.scope import Nope, Scope, kind_of

FORMS = ("plain", "method", "in place", "out=", "list", "through a view")
_WEIGHTS = (4, 2, 3, 1.5, 1.5, 2)


def draw_form(s: Scope, name: str, *, root: str = "torch") -> str:
    """A form that the op has."""
    namespace = torch.nn.functional if root == "F" else torch
    has = {
        "plain": hasattr(namespace, name),
        "method": hasattr(torch.Tensor, name),
        "in place": hasattr(torch.Tensor, f"{name}_"),
        "out=": hasattr(namespace, name) and root == "torch",
        "list": hasattr(torch, f"_foreach_{name}"),
        "through a view": hasattr(torch.Tensor, f"{name}_"),
    }
    forms, weights = zip(*((f, w) for f, w in zip(FORMS, _WEIGHTS, strict=True) if has[f]), strict=True)
    return str(s.rng.choices(forms, weights)[0])


def formed(
    s: Scope, name: str, x: Ref, *rest: Any, root: str = "torch", form: str = "", **kwargs: Any
) -> list[Ref]:
    """The op on x and the rest, in some form (lists and views are drawn by `listed` and `through_view`)."""
    form = form or draw_form(s, name, root=root)
    if form in {"in place", "through a view"}:
        return s.do(f".{name}_", x, *rest, form=form, result=s.chance(0.3), **kwargs)
    if form == "method":
        return s.do(f".{name}", x, *rest, form=form, **kwargs)
    if form == "out=":
        return into(s, f"{root}.{name}", x, *rest, **kwargs)
    return s.do(f"{root}.{name}", x, *rest, **kwargs)


def into(s: Scope, call: str, *args: Any, **kwargs: Any) -> list[Ref]:
    """With `out=`: a tensor of the right shape that holds something else, or is part of a larger one."""
    like = s.trial(call, *args, **kwargs)
    many = isinstance(like, tuple | list)
    out = tuple(_target(s, x) for x in like) if many else _target(s, like)
    if many and len(set(map(str, out))) < len(out):  # one tensor for two results: torch's own kernels break
        raise Nope
    mode, s.grad_mode = s.grad_mode, False if s.chance(0.9) else s.grad_mode
    s.do(call, *args, form="out=", result=False, out=out, **kwargs)
    s.grad_mode = mode
    return list(out) if many else [out]


def _target(s: Scope, like: Any) -> Ref:
    if not isinstance(like, torch.Tensor):
        raise Nope
    shape = tuple(like.shape)
    if s.chance(0.1):  # something that there is, perhaps what is read
        return s.pick("fcib", where=lambda t: tuple(t.shape) == shape and t.dtype == like.dtype, written=True)
    if shape and s.chance(0.3):
        dim = s.rng.randrange(len(shape))
        larger = (*shape[:dim], shape[dim] + 2, *shape[dim + 1 :])
        base = s.leaf(larger, like.dtype, grad=False)
        return s.do(".narrow", base, dim, s.rng.randrange(3), shape[dim])[0]
    return s.leaf(shape, like.dtype, grad=False)


def target(s: Scope, form: str, kinds: str, dims: int = 0, where: Any = lambda x: True) -> Ref:
    """What an op reads first; where it writes, a view of something or something that may be written."""
    written = form in {"in place", "through a view"}
    x = s.pick(kinds, dims=dims, where=where, written=written)
    if form == "through a view":
        x = take_view(s, x)
        if s[x].dim() < dims or kind_of(s[x]) not in kinds or not where(s[x]):
            raise Nope
    return x

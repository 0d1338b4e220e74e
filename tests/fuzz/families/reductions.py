"""Reductions, scans, orders, products of matrices."""

from __future__ import annotations

from typing import Any

import torch

from tests.fuzz.families.forms import draw_form, formed, into, target
from tests.fuzz.program import Ref
from tests.fuzz.scope import Nope, Scope, kind_of

_OF_DIMS = (
    "sum",
    "mean",
    "amax",
    "amin",
    "var",
    "std",
    "logsumexp",
    "nansum",
    "count_nonzero",
    "all",
    "any",
    "norm",
)
_OF_A_DIM = ("prod", "max", "min", "argmax", "argmin", "median", "aminmax", "all", "any", "kthvalue", "mode")
_WHOLE = (
    "sum",
    "mean",
    "prod",
    "max",
    "min",
    "any",
    "all",
    "var",
    "argmax",
    "argmin",
    "norm",
    "median",
    "aminmax",
    "std",
)
_SCANS = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")


def reduction(s: Scope) -> None:
    """Over some dims, one dim, or all."""
    roll = s.rng.random()
    if roll < 0.5:
        return _of_dims(s)
    return _of_a_dim(s) if roll < 0.75 else _of_all(s)


def _of_dims(s: Scope) -> None:
    name = s.rng.choice(_OF_DIMS)
    kinds = (
        "fcib"
        if name in {"sum", "all", "any", "count_nonzero"}
        else "fi"
        if name in {"amax", "amin"}
        else "f"
    )
    x = s.pick(kinds, dims=1)
    count = 1 if name == "count_nonzero" and s.chance(0.5) else s.rng.randint(1, s[x].dim())
    dims = tuple(s.rng.sample(range(s[x].dim()), count))
    kwargs: dict[str, Any] = {"dim": dims if len(dims) > 1 or s.chance(0.5) else dims[0]}
    if name != "count_nonzero" and s.chance(0.4):
        kwargs["keepdim"] = True
    if name in {"sum", "mean"} and s.chance(0.1):
        kwargs["dtype"] = torch.float64
    if name in {"var", "std"} and s.chance(0.5):
        kwargs["correction"] = 0
    _reduced(s, name, x, **kwargs)


def _reduced(s: Scope, name: str, x: Ref, *args: Any, **kwargs: Any) -> None:
    form = s.rng.choices(("plain", "method", "out="), (3, 3, 1))[0]
    if form == "out=" and args + tuple(kwargs):
        into(s, f"torch.{name}", x, *args, **kwargs)
    else:
        s.do(
            f"torch.{name}" if form == "plain" else f".{name}",
            x,
            *args,
            form=form if form != "out=" else "method",
            **kwargs,
        )


def _of_a_dim(s: Scope) -> None:
    name = s.rng.choice(_OF_A_DIM)
    x = s.pick("fib" if name in {"all", "any"} else "fi", dims=1, where=lambda t: t.numel() > 0)
    dim = s.dims(s[x])
    args = (s.rng.randint(1, s[x].shape[dim]),) if name == "kthvalue" else ()
    _reduced(s, name, x, *args, dim=dim, **({"keepdim": True} if s.chance(0.4) else {}))


def _of_all(s: Scope) -> None:
    name = s.rng.choice(_WHOLE)
    kinds = "fcib" if name == "sum" else "fib" if name in {"any", "all", "max", "min"} else "f"
    x = s.pick(kinds)
    s.do(s.rng.choice((f"torch.{name}", f".{name}")), x)


def scan(s: Scope) -> None:
    """A scan along a dim."""
    name = s.rng.choice(_SCANS)
    x = s.pick("f" if name == "logcumsumexp" else "fi", dims=1)
    form = draw_form(s, name)
    if form in {"in place", "through a view"}:
        x = target(s, form, "fi", 1)
    formed(s, name, x, s.dims(s[x]), form="method" if form == "list" else form)


def order(s: Scope) -> None:
    """Sorts, top k, searches."""
    name = s.rng.choice(
        ("sort", "argsort", "topk", "msort", "unique", "searchsorted", "bucketize", "flip_sort")
    )
    x = s.pick("fi", dims=1)
    dim = s.dims(s[x])
    if name == "sort":
        _reduced(s, "sort", x, dim=dim, descending=s.chance(0.5), stable=True)
    elif name == "argsort":
        s.do("torch.argsort", x, dim=dim, descending=s.chance(0.5), stable=True)
    elif name == "topk":
        values = s[x].detach()
        if values.unique().numel() < values.numel():
            raise Nope  # which of equals is taken is nobody's promise
        _reduced(s, "topk", x, s.rng.randint(1, max(s[x].shape[dim], 1)), dim, s.chance(0.7))
    elif name == "msort":
        s.do("torch.msort", x)
    elif name == "unique":
        s.do("torch.unique", x)
    else:
        _search(s, name, x)


def _search(s: Scope, name: str, x: Ref) -> None:
    line = s.pick(kind_of(s[x]), dims=1, where=lambda t: t.dim() == 1)
    (edges, _) = s.do("torch.sort", line)
    s.do("torch.searchsorted", edges, x) if name == "searchsorted" else s.do("torch.bucketize", x, edges)


def product(s: Scope) -> None:
    """Products of matrices and vectors."""
    name = s.rng.choice(("mm", "matmul", "bmm", "addmm", "mv", "dot", "outer", "einsum", "linear", "baddbmm",
                         "tensordot", "@", "matmul1", "addmv", "vdot", "kron"))  # fmt: skip
    kinds = "fc" if s.chance(0.85) else "i"
    if name in {"mm", "addmm", "linear", "einsum", "mv", "addmv"}:
        x = s.pick(kinds, dims=2, where=lambda t: t.dim() == 2)
        _of_matrices(s, name, x)
    elif name in {"bmm", "baddbmm"}:
        x = s.pick(kinds, dims=3, where=lambda t: t.dim() == 3)
        b, n, k = s[x].shape
        y = s.partner(s[x], (b, k, s.rng.randint(1, 5)))
        if name == "bmm":
            formed(s, "bmm", x, y, form=s.rng.choice(("plain", "method", "out=")))
        else:
            formed(s, "baddbmm", s.partner(s[x], (b, n, s[y].shape[2])), x, y,
                   form=s.rng.choice(("plain", "in place")))  # fmt: skip
    elif name in {"dot", "outer", "vdot"}:
        x = s.pick(kinds, dims=1, where=lambda t: t.dim() == 1)
        other = tuple(s[x].shape) if name != "outer" else (s.rng.randint(1, 5),)
        formed(s, name, x, s.partner(s[x], other), form=s.rng.choice(("plain", "method", "out=")))
    elif name == "tensordot":
        x = s.pick(kinds, dims=2)
        s.do("torch.tensordot", x, s.partner(s[x], (*s[x].shape[-2:], 3)), 2)
    elif name == "kron":
        x = s.pick(kinds, dims=2, where=lambda t: t.numel() < 30)
        s.do("torch.kron", x, s.leaf((2, 3), s[x].dtype))
    else:
        _of_batches(s, kinds)


def _of_matrices(s: Scope, name: str, x: Ref) -> None:
    n, k = s[x].shape
    m = s.rng.randint(1, 6)
    if name == "mm":
        formed(s, "mm", x, s.partner(s[x], (k, m)), form=s.rng.choice(("plain", "method", "out=")))
    elif name == "mv":
        s.do("torch.mv", x, s.partner(s[x], (k,)))
    elif name == "addmv":
        formed(
            s,
            "addmv",
            s.partner(s[x], (n,)),
            x,
            s.partner(s[x], (k,)),
            form=s.rng.choice(("plain", "in place")),
        )
    elif name == "linear":
        bias = (s.leaf((m,), s[x].dtype),) if s.chance(0.5) else ()
        s.do("F.linear", x, s.partner(s[x], (m, k)), *bias)
    elif name == "einsum":
        text, shape = s.rng.choice(
            (("ij,jk->ki", (k, m)), ("ij,ij->i", (n, k)), ("ij,kj->", (m, k)), ("ij,k->kij", (m,)))
        )
        s.do("torch.einsum", text, x, s.partner(s[x], shape))
    else:
        bias = s.partner(s[x], s.rng.choice(((n, m), (m,), (1, m), (n, 1), ())))
        kwargs = {"beta": 2, "alpha": -1} if s.chance(0.3) else {}
        y = s.partner(s[x], (k, m))
        alone = bias not in {x, y}  # else the product is written while it is read
        form = "in place" if s[bias].shape == (n, m) and alone and s.chance(0.4) else "plain"
        formed(s, "addmm", bias, x, y, form=form, **kwargs)


def _of_batches(s: Scope, kinds: str) -> None:
    x = s.pick(kinds, dims=1)
    k = s[x].shape[-1]
    shape: tuple[int, ...] = s.rng.choice(((k,), (k, 3), (1, k, 2), (*s[x].shape[:-2], k, 3)))
    s.do("torch.matmul", x, s.partner(s[x], shape))

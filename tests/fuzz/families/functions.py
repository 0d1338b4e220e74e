"""Functions of numbers beyond the everyday ones: special, spectral, linear algebra, statistics, complex."""

from __future__ import annotations

from typing import Any

import torch

from tests.fuzz.families.forms import into
from tests.fuzz.program import Ref
from tests.fuzz.scope import Nope, Scope

_SPECIAL = ("bessel_j0", "bessel_j1", "digamma", "entr", "erfc", "erfcx", "exp2", "expit", "gammaln", "i0",
            "i0e", "i1", "i1e", "log_ndtr", "ndtr", "sinc", "spherical_bessel_j0")  # fmt: skip
_FFT = ("fft", "ifft", "rfft", "hfft", "fftn", "fft2", "ifftn", "rfftn", "rfft2")
_WIDE = (torch.float64, torch.float32, torch.complex128, torch.complex64)


def special(s: Scope) -> None:
    """`torch.special`, of one tensor or two."""
    x = s.pick("f")
    if s.chance(0.25):
        name = s.rng.choice(("xlog1py", "xlogy", "zeta"))
        y = s.leaf(tuple(s[x].shape), s[x].dtype, "positive")
        if name == "zeta":
            s.do("torch.special.zeta", s.do("torch.add", y, 1)[0], y)
        else:
            s.do(f"torch.special.{name}", x, y)
        return
    name = s.rng.choice((*_SPECIAL, "logit", "polygamma", "round"))
    if name == "logit":
        s.do("torch.special.logit", x, 0.1)
    elif name == "polygamma":
        s.do("torch.polygamma", s.rng.randint(0, 2), s.leaf(tuple(s[x].shape), s[x].dtype, "positive"))
    elif name == "round":
        s.do("torch.round", x, decimals=s.rng.choice((0, 1, -1)))
    elif s.chance(0.2):
        into(s, f"torch.special.{name}", x)
    else:
        s.do(f"torch.special.{name}", x)


def spectral(s: Scope) -> None:
    """Fourier transforms and their shifts."""
    x = s.pick("fc", dims=1, where=lambda t: t.dtype in _WIDE and t.numel() > 0)
    t = s[x]
    name = s.rng.choice((*_FFT, "fftshift", "ifftshift"))
    if name.startswith("r") and t.is_complex():
        raise Nope
    if name.endswith("shift"):
        s.do(f"torch.fft.{name}", x, *((s.dims(t),) if s.chance(0.6) else ()))
    elif name.endswith(("n", "2")):
        if t.dim() < 2:
            raise Nope
        s.do(f"torch.fft.{name}", x, norm=s.rng.choice(("backward", "ortho", "forward")))
    else:
        kwargs = {"n": s.rng.randint(1, 8)} if s.chance(0.3) else {}
        s.do(f"torch.fft.{name}", x, dim=s.dims(t), **kwargs)


def linear_algebra(s: Scope) -> None:
    """Decompositions and solutions of well-conditioned matrices, norms, products."""
    s.rng.choice((_of_a_matrix, _of_a_matrix, _norms, _products))(s)


def _of_a_matrix(s: Scope) -> None:
    x = s.pick("fc", dims=2, where=lambda t: t.dtype in _WIDE and 0 < t.shape[-2] <= 6 and t.shape[-1] > 0)
    n = s[x].shape[-2]
    (square,) = s.do("torch.matmul", x, s.do(".mH", x, form="attribute")[0])
    eye = s.do("torch.add", square, s.leaf((n, n), s[x].dtype, "eye", grad=False, pending=False))
    name = s.rng.choice(("det", "slogdet", "inv", "solve", "cholesky", "eigvalsh", "svdvals", "matrix_power",
                         "matrix_exp", "qr", "pinv", "solve_triangular", "logdet", "lu_factor",
                         "inverse"))  # fmt: skip
    if name in {"logdet", "inverse"}:
        s.do(f"torch.{name}", *eye)
    elif name == "solve":
        s.do("torch.linalg.solve", *eye, x)
    elif name == "solve_triangular":
        s.do("torch.linalg.solve_triangular", *eye, x, upper=s.chance(0.5))
    elif name == "matrix_power":
        s.do("torch.linalg.matrix_power", *eye, s.rng.choice((0, 1, 2, 3)))
    elif name in {"inv", "det", "cholesky"} and s.chance(0.2):
        into(s, f"torch.linalg.{name}", *eye)
    else:
        s.do(f"torch.linalg.{name}", *eye)


def _norms(s: Scope) -> None:
    x = s.pick("fc", dims=2)
    name = s.rng.choice(("vector_norm", "matrix_norm", "norm"))
    if name == "vector_norm":
        s.do("torch.linalg.vector_norm", x, s.rng.choice((1, 2, 3, float("inf"), 0.5)), dim=s.dims(s[x]),
             keepdim=s.chance(0.3))  # fmt: skip
    elif name == "matrix_norm":
        s.do("torch.linalg.matrix_norm", x, s.rng.choice(("fro", "nuc", 1, float("inf"))))
    else:
        s.do("torch.linalg.norm", x, dim=(-1, -2) if s.chance(0.5) else s.dims(s[x]))


def _products(s: Scope) -> None:
    x = s.pick("fc", dims=2, where=lambda t: t.dim() == 2 and t.numel() > 0)
    t = s[x]
    name = s.rng.choice(("multi_dot", "vander", "cross", "vecdot", "chain_matmul", "inner", "addbmm", "addr"))
    if name in {"multi_dot", "chain_matmul"}:
        call = "torch.linalg.multi_dot" if name == "multi_dot" else "torch.chain_matmul"
        members = [x, s.partner(t, (t.shape[1], 3)), s.partner(t, (3, 2))]
        s.do(call, *([members] if name == "multi_dot" else members))
    elif name == "vander":
        s.do("torch.linalg.vander", s.pick("f", dims=1, where=lambda v: v.numel() < 40), N=3)
    elif name == "cross":
        dims = [d for d in range(t.dim()) if t.shape[d] == 3]
        if not dims:
            raise Nope
        s.do("torch.linalg.cross", x, s.partner(t), dim=dims[0])
    elif name == "addr":
        s.do("torch.addr", x, s.partner(t, (t.shape[0],)), s.partner(t, (t.shape[1],)))
    elif name == "addbmm":
        s.do("torch.addbmm", x, s.partner(t, (2, t.shape[0], 3)), s.partner(t, (2, 3, t.shape[1])))
    else:
        s.do("torch.inner" if name == "inner" else "torch.linalg.vecdot", x, s.partner(t))


def statistics(s: Scope) -> None:
    """Quantiles, moments, histograms, distances, differences."""
    s.rng.choice((_moments, _moments, _distances, _differences, _counts))(s)


def _moments(s: Scope) -> None:
    name = s.rng.choice(("var_mean", "std_mean", "nanmean", "nanmedian", "quantile", "nanquantile", "cov",
                         "corrcoef", "std", "nansum", "logsumexp", "softmax"))  # fmt: skip
    x = s.pick("f", dims=1, where=lambda t: t.numel() > 0)
    t = s[x]
    if name in {"cov", "corrcoef"}:
        if t.dim() != 2 or min(t.shape) < 2:
            raise Nope
        s.do(f"torch.{name}", x)
    elif name in {"quantile", "nanquantile"}:
        q = s.rng.choice((0.5, 0.25, 0.9))
        s.do(f"torch.{name}", x, q, *((s.dims(t),) if s.chance(0.7) else ()))
    else:
        kwargs: dict[str, Any] = {"dim": s.dims(t)}
        if name != "softmax" and s.chance(0.4):
            kwargs["keepdim"] = True
        s.do(f"torch.{name}", x, **kwargs)


def _distances(s: Scope) -> None:
    name = s.rng.choice(("cdist", "dist", "pdist", "pairwise_distance", "renorm", "cosine_similarity"))
    x = s.pick("f", dims=2, where=lambda t: t.dtype in _WIDE and t.numel() > 0)
    t = s[x]
    if name == "renorm":
        s.do("torch.renorm", x, 2, s.dims(t), s.rng.choice((0.5, 2.0)))
    elif name == "pdist":
        s.do("F.pdist", s.pick("f", dims=2, where=lambda v: v.dim() == 2 and v.shape[0] > 1), 2.0)
    elif name == "cdist":
        s.do("torch.cdist", x, s.partner(t, (*t.shape[:-2], 3, t.shape[-1])), s.rng.choice((1.0, 2.0)))
    elif name == "dist":
        s.do("torch.dist", x, s.partner(t), s.rng.choice((1, 2)))
    else:
        s.do(f"F.{name}", x, s.partner(t))


def _differences(s: Scope) -> None:
    name = s.rng.choice(("trapezoid", "cumulative_trapezoid", "diff", "gradient", "cummax", "logcumsumexp"))
    x = s.pick("f", dims=1, where=lambda t: t.numel() > 0)
    t = s[x]
    dim = s.dims(t)
    if name == "gradient":
        if t.shape[dim] < 3:
            raise Nope
        s.do("torch.gradient", x, dim=dim)
    elif name == "diff":
        before = s.partner(t, tuple(1 if d == dim % t.dim() else n for d, n in enumerate(t.shape)))
        s.do("torch.diff", x, s.rng.randint(1, 2), dim, **({"prepend": before} if s.chance(0.5) else {}))
    elif name == "trapezoid" and s.chance(0.4):
        s.do("torch.trapezoid", x, s.partner(t), dim=dim)
    else:
        s.do(f"torch.{name}", x, dim=dim)


def _counts(s: Scope) -> None:
    name = s.rng.choice(("histc", "isin", "unique_consecutive", "unique counts", "searchsorted right",
                         "bucketize right", "count_nonzero", "bincount weights"))  # fmt: skip
    x = s.pick("fi", dims=1, where=lambda t: t.numel() > 0)
    t = s[x]
    if name == "histc":
        s.do("torch.histc", s.pick("f"), bins=s.rng.randint(2, 5), min=-3, max=3)
    elif name == "isin":
        s.do("torch.isin", x, s.partner(t, (4,)), **({"invert": True} if s.chance(0.3) else {}))
    elif name == "unique_consecutive":
        s.do("torch.unique_consecutive", x, return_counts=True)
    elif name == "unique counts":
        s.do("torch.unique", x, return_inverse=True, return_counts=True)
    elif name == "count_nonzero":
        s.do("torch.count_nonzero", x)
    elif name == "bincount weights":
        s.do("torch.bincount", s.leaf((5,), torch.int64, "index 4"), s.leaf((5,), torch.float64, grad=False))
    else:
        (edges, _) = s.do("torch.sort", s.leaf((5,), t.dtype, grad=False))
        order = (edges, x) if name.startswith("s") else (x, edges)
        s.do(f"torch.{name.split()[0]}", *order, right=True)


def complex_numbers(s: Scope) -> None:
    """To complex numbers and back."""
    name = s.rng.choice(("complex", "polar", "view_as_real", "real", "imag", "angle", "abs", "conj_physical",
                         "resolve_conj", "conj matmul", "sgn", "isreal"))  # fmt: skip
    if name in {"complex", "polar"}:
        x = s.pick("f", where=lambda t: t.dtype in _WIDE)
        s.do(f"torch.{name}", x, s.partner(s[x]))
        return
    x = s.pick("c", dims=2 if name == "conj matmul" else 0)
    if name == "conj matmul":
        s.do("torch.matmul", s.do(".mH", x, form="attribute")[0], x)
    else:
        s.do(f"torch.{name}", x)


def written_parts(s: Scope) -> None:
    """A part replaced, nothing written: the `*_scatter` forms; and reductions into indices."""
    name = s.rng.choice(("select_scatter", "slice_scatter", "diagonal_scatter", "index_reduce", "put",
                         "masked_fill tensor", "index_put", "scatter multiply", "index_reduce_"))  # fmt: skip
    x = s.pick("f", dims=1, where=lambda t: t.numel() > 0, written=name.endswith("_"))
    t = s[x]
    dim = s.dims(t)
    if name == "select_scatter":
        at = s.rng.randrange(t.shape[dim])
        s.do("torch.select_scatter", x, s.partner(s.trial(".select", x, dim, at)), dim, at)
    elif name == "slice_scatter":
        at = s.rng.randrange(t.shape[dim])
        part = s.trial(".narrow", x, dim, at, t.shape[dim] - at)
        s.do("torch.slice_scatter", x, s.partner(part), dim, at, t.shape[dim])
    elif name == "diagonal_scatter":
        if t.dim() != 2:
            raise Nope
        s.do("torch.diagonal_scatter", x, s.partner(s.trial(".diagonal", x)))
    elif name.startswith("index_reduce"):
        index = s.leaf((3,), torch.int64, f"index {t.shape[dim]}")
        shape = tuple(3 if d == dim % t.dim() else n for d, n in enumerate(t.shape))
        how = s.rng.choice(("prod", "mean", "amax", "amin"))
        call = f".{name}" if name.endswith("_") else "torch.index_reduce"
        s.do(call, x, dim, index, s.partner(t, shape), how, include_self=s.chance(0.7),
             form="in place" if name.endswith("_") else "plain", result=not name.endswith("_"))  # fmt: skip
    elif name == "masked_fill tensor":
        s.do("torch.masked_fill", x, s.leaf(tuple(t.shape), torch.bool), s.leaf((), t.dtype))
    elif name == "index_put":
        index = (s.leaf((3,), torch.int64, f"index {t.shape[0]}"),)
        s.do("torch.index_put", x, index, s.partner(t, (3, *t.shape[1:])), True)
    elif name == "put":
        line = s.leaf((4,), torch.int64, f"index {t.numel()}")
        s.do("torch.put", x, line, s.partner(t, (4,)), True)
    else:
        index = s.leaf(tuple(t.shape), torch.int64, f"index {t.shape[dim]}")
        s.do("torch.scatter", x, dim, index, 2.0, reduce=s.rng.choice(("multiply", "add")))


def parts(s: Scope) -> None:
    """Splits and joins by other names."""
    x = s.pick("fcib", dims=1)
    t = s[x]
    name = s.rng.choice(("hsplit", "vsplit", "dsplit", "tensor_split", "split_copy", "unbind_copy", "dstack",
                         "column_stack", "atleast_3d", "broadcast_tensors", "cartesian_prod", "combinations",
                         "unsafe_chunk", "narrow_copy", "argwhere", "where", "fliplr", "flipud",
                         "broadcast_to", "row_stack", "tril_indices"))  # fmt: skip
    dim = s.dims(t)
    if name in {"hsplit", "vsplit", "dsplit"}:
        s.do(f".{name}", x, [s.rng.randint(0, 3)], form="view")
    elif name == "tensor_split":
        s.do(".tensor_split", x, sorted(s.rng.randint(-1, 4) for _ in range(2)), dim, form="view")
    elif name in {"split_copy", "unsafe_chunk"}:
        _few(s, s.do(f"torch.{name}", x, s.rng.randint(1, 4), dim))
    elif name == "unbind_copy":
        _few(s, s.do("torch.unbind_copy", x, dim))
    elif name in {"dstack", "column_stack", "row_stack"}:
        s.do(f"torch.{name}", [x, s.partner(t)])
    elif name == "broadcast_tensors":
        s.do("torch.broadcast_tensors", x, s.broadcast(t))
    elif name == "broadcast_to":
        s.do("torch.broadcast_to", x, (2, *t.shape))
    elif name in {"cartesian_prod", "combinations"}:
        line = s.pick("fi", dims=1, where=lambda v: v.dim() == 1 and 0 < v.numel() < 7)
        s.do(f"torch.{name}", *((line, s.partner(s[line], (2,))) if name == "cartesian_prod" else (line,)))
    elif name == "narrow_copy":
        s.do("torch.narrow_copy", x, dim, 0, s.rng.randint(0, t.shape[dim]))
    elif name == "where":
        s.do("torch.where", s.do("torch.ne", x, 0)[0])
    elif name == "tril_indices":
        s.do(".tril", s.pick("fi", dims=2), s.rng.randint(-1, 1), form="method")
    else:
        s.do(f"torch.{name}", x)


def _few(s: Scope, found: list[Ref]) -> None:
    if len(found) > 8:
        raise Nope

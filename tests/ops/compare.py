"""Is a result on DTensors the single-device result? Structure, shapes, dtypes and values."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map

# By dtype, relative to the largest value of the tensor: sums are taken in another order.
_TOLERANCE = {torch.float32: 3e-5, torch.float64: 1e-10, torch.complex64: 3e-5, torch.complex128: 1e-10,
              torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.complex32: 3e-3}  # fmt: skip


def whole(tree: Any) -> Any:
    """Every DTensor as its full value."""
    return tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, tree)


def difference(got: Any, wanted: Any) -> str:
    """How two results differ, in one line; empty if they do not."""
    got_leaves, got_tree = tree_flatten(got)
    wanted_leaves, wanted_tree = tree_flatten(wanted)
    if len(got_leaves) != len(wanted_leaves):
        return f"{len(got_leaves)} results for {len(wanted_leaves)}: {got_tree} for {wanted_tree}"
    if _kinds(got) != _kinds(wanted):
        return f"results come as {_kinds(got)} for {_kinds(wanted)}"
    for index, (g, w) in enumerate(zip(got_leaves, wanted_leaves, strict=True)):
        text = _of_leaf(g, w)
        if text:
            return f"result {index}: {text}"
    return ""


def _kinds(value: Any) -> str:
    """tuple or list of what; torch's named tuples count as tuples."""
    if isinstance(value, list):
        return "list"
    return "tuple" if isinstance(value, tuple) else "one"


def _of_leaf(got: Any, wanted: Any) -> str:
    if not isinstance(wanted, torch.Tensor):
        same = got == wanted or (got != got and wanted != wanted)  # noqa: PLR0124 - a NaN
        same = same or (isinstance(wanted, float | complex) and abs(got - wanted) <= 1e-5 * abs(wanted))
        return "" if same else f"{got!r} for {wanted!r}"
    if not isinstance(got, torch.Tensor):
        return f"{type(got).__name__} for a tensor"
    if tuple(got.shape) != tuple(wanted.shape):
        return f"shape {tuple(got.shape)} for {tuple(wanted.shape)}"
    if got.dtype != wanted.dtype:
        return f"dtype {got.dtype} for {wanted.dtype}"
    return _of_values(got.detach(), wanted.detach())


def _of_values(got: torch.Tensor, wanted: torch.Tensor) -> str:
    if not wanted.numel():
        return ""
    if wanted.dtype not in _TOLERANCE:
        return "" if torch.equal(got, wanted) else _first_wrong(got, wanted, got != wanted)
    bound = _TOLERANCE[wanted.dtype]
    if wanted.dtype.is_complex:
        got, wanted = (torch.view_as_real(x.resolve_conj().resolve_neg()).double() for x in (got, wanted))
    finite = wanted[torch.isfinite(wanted)].abs()
    scale = max(1.0, float(finite.max()) if finite.numel() else 1.0)
    close = torch.isclose(got, wanted, rtol=bound, atol=bound * scale, equal_nan=True)
    return "" if bool(close.all()) else _first_wrong(got, wanted, ~close)


def _first_wrong(got: torch.Tensor, wanted: torch.Tensor, wrong: torch.Tensor) -> str:
    at = tuple(wrong.nonzero()[0].tolist())
    count = f"{int(wrong.sum())} of {wrong.numel()} wrong"
    return f"{got[at].item()!r} for {wanted[at].item()!r} at {at}, {count}"


def strides_differ(got: Any, wanted: Any) -> str:
    """Does a result say that it lies otherwise than one device's? Where that says nothing dense, it may."""
    for index, (g, w) in enumerate(zip(tree_flatten(got)[0], tree_flatten(wanted)[0], strict=False)):
        if not (isinstance(g, DTensor) and isinstance(w, torch.Tensor)) or g.shape != w.shape:
            continue
        if w.layout == torch.strided and w.numel() and _is_dense(w) and _steps(g) != _steps(w):
            return f"result {index}: stride {g.stride()} for {w.stride()} of {tuple(w.shape)}"
    return ""


def _steps(x: torch.Tensor) -> list[int]:
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def _is_dense(x: torch.Tensor) -> bool:
    return bool(torch.empty_like(x).stride() == x.stride())

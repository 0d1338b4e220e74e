"""A batch as micro-batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardwright.compat import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from shardwright.errors import ParallelError, refuse_other_kind

Dims = Mapping[str, int | None]
Batch = tuple[tuple[Any, ...], dict[str, Any], Any]

_ASK = "ask"  # the dim is 0, if the size is that of the batch
Dim = int | str | None


def micro_batches(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any,
    n: int,
    dims: Dims,
    forward: Callable[..., Any] | None = None,
) -> list[Batch]:
    """`n` equal parts of the arguments and the target, along the batch.

    The batch is dim 0 of the first tensor; tensors whose dim 0 is as long are cut, those with one row and
    those without dims are handed to all. `dims` says otherwise by name: the dim of the batch, None for whole.
    A dim that is named may have several elements for each row, one row after another (patches of images).
    `forward` tells the names of what is given by position.
    Raises: ParallelError: `n` does not divide the batch, or a tensor has another number of rows.
    """
    flat, tree = tree_flatten((args, kwargs, target))
    names = _names(forward, len(args)) if dims and forward is not None else [None] * len(args)
    named = _dims_of([*zip(names, args, strict=True), *kwargs.items()], target, dims)
    lengths = [
        (isinstance(d, int), x.shape[_place(x, d)])
        for x, d in zip(flat, named, strict=True)
        if isinstance(x, Tensor) and x.ndim > 0 and d is not None
    ]
    rows = _rows(lengths)
    if not lengths:
        raise ParallelError("pipeline: no tensor among the arguments has rows that could be cut")
    if n < 1 or rows % n:
        fits = [d for d in range(1, rows + 1) if rows % d == 0]
        raise ParallelError(
            f"pipeline: {n} micro-batches do not divide a batch of {rows} rows; choose micro_batches from "
            f"{', '.join(map(str, fits))}, or pad the batch"
        )
    parts = [_cut(x, d, rows, n) for x, d in zip(flat, named, strict=True)]
    return [tree_unflatten([part[i] for part in parts], tree) for i in range(n)]


def _rows(lengths: list[tuple[bool, int]]) -> int:
    """Of the batch: by the first length of a dim that nobody named, for one that was may have more."""
    many = [(named, length) for named, length in lengths if length != 1]  # one row may stand for all
    unnamed = [length for named, length in many if not named]
    return unnamed[0] if unnamed else min((length for _, length in many), default=1)


def _place(x: Tensor, dim: Dim) -> int:
    """The dim of the batch, counted from the first."""
    if not isinstance(dim, int):
        return 0
    if not -x.ndim <= dim < x.ndim:
        raise ParallelError(f"pipeline: batch_dims says {dim} of a tensor of shape {tuple(x.shape)}")
    return dim % x.ndim


def _names(forward: Callable[..., Any], many: int) -> list[str | None]:
    """Of so many arguments that are given by position; those of `*args` have none."""
    parameters = inspect.signature(forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:many]
    return [*names, *[None] * (many - len(names))]


def _dims_of(given: Sequence[tuple[str | None, Any]], target: Any, dims: Dims) -> list[Dim]:
    """For each leaf, the dim that was given for the argument that it is in.  given: names and values."""
    fix = "batch_dims={argument: dim of its batch}, None for one that is not cut"
    refuse_other_kind("pipeline: batch_dims", dims, Mapping, ParallelError, fix=fix)
    known = [name for name, _ in given if name is not None]
    unknown = [name for name in dims if name not in known]
    if unknown:
        raise ParallelError(
            f"pipeline: batch_dims names {unknown[0]!r}, which is no argument of this step; it has "
            f"{', '.join(known) or 'none with a name'}"
        )
    for named, dim in dims.items():
        if type(dim) not in (int, type(None)):
            raise ParallelError(f"pipeline: batch_dims[{named!r}]={dim!r:.60} is no dim\n  fix: {fix}")
    found: list[Dim] = []
    for name, value in given:
        found += [_ASK if name is None else dims.get(name, _ASK)] * len(tree_flatten(value)[0])
    return found + [_ASK] * len(tree_flatten(target)[0])


def _cut(x: Any, dim: Dim, rows: int, n: int) -> list[Any]:
    if not isinstance(x, Tensor) or x.ndim == 0 or dim is None or (dim == _ASK and x.shape[0] == 1):
        return [x] * n
    at = _place(x, dim)
    if x.shape[at] != rows and not (isinstance(dim, int) and rows and x.shape[at] % rows == 0):
        raise ParallelError(
            f"pipeline: a tensor of shape {tuple(x.shape)} beside a batch of {rows} rows; name the dim of "
            "its batch (it may have several elements for each row) with batch_dims={argument: dim}, or None "
            "for what every micro-batch is handed whole"
        )
    return list(x.chunk(n, dim=at))


def copied(batch: Batch) -> Batch:
    """A copy: what a run of the model writes into must not be the user's, nor another run's."""
    made: Batch = tree_map_only(Tensor, lambda x: x.clone(), batch)
    return made


def versions(batch: Batch) -> list[int]:
    """How often each tensor was written into."""
    return [x._version for x in tree_leaves(batch) if isinstance(x, Tensor)]


_PLAIN = (int, float, complex, bool, str, bytes, type(None))


def signature(batches: list[Batch]) -> list[str]:
    """What of the micro-batches decides which shapes cross the borders, the same on every rank of the axis.

    An object that is no plain value counts by its class: what is in it may change, and is not looked at.
    Raises: ParallelError: micro-batches have different shapes.
    """
    said = [_said(batch) for batch in batches]
    if any(one != said[0] for one in said):
        raise ParallelError("pipeline: micro-batches have different shapes; pad the batch")
    return [f"{len(batches)} micro-batches", *said[0]]


def _said(batch: Batch) -> list[str]:
    leaves, structure = tree_flatten(batch[:2])
    return [*(_told(leaf) for leaf in leaves), str(structure)]


def _told(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"a tensor {x.dtype} {tuple(x.shape)} {getattr(x, 'placements', '')}"
    return repr(x) if isinstance(x, _PLAIN) else f"{type(x).__module__}.{type(x).__qualname__}"

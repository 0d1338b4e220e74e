"""Running an op on windows: exchange the borders of a cut dim, call the op on them, send gradients back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwright.comm.functional import exchange_rows
from shardwright.compat import axis_names
from shardwright.layout.layout import Layout
from shardwright.remember import remembered
from shardwright.rules.algorithms.algorithm import register_algorithm
from shardwright.rules.call import Call
from shardwright.rules.op import by_name
from shardwright.rules.window_ops import WINDOW_OPS, Piece
from shardwright.rules.windows import Halo, Interval, WindowPlan, plan_windows
from shardwright.tensor.dispatch.metadata import called
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.explicit_mode import refuse_exchange
from shardwright.tensor.move import move_operands
from shardwright.tensor.spec import coords_of, spec_of
from shardwright.tensor.wrap import wrap


@remembered(4096)
def _plan(call: Call, layouts: tuple[Layout, ...]) -> WindowPlan | None:
    return plan_windows(WINDOW_OPS[call.op._schema.name].sliding, call, layouts)


def _cost(call: Call, layouts: Sequence[Layout]) -> int | None:
    plan = _plan(call, tuple(layouts))
    return None if plan is None else plan.bytes


@register_algorithm(*WINDOW_OPS, cost=_cost)
def on_windows(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """windows over a cut dim: only the rows at the borders are exchanged."""
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    given = {**defaults, **by_name(op, args, kwargs)}
    tensors = [value for value in given.values() if isinstance(value, DTensor)]
    if not tensors:
        return op(*args, **kwargs)
    plan = _plan(called(op, args, kwargs), tuple(x._spec.layout for x in tensors))
    if plan is None:
        return op(*args, **kwargs)
    out = _run(op, given, tensors, plan)
    return out[0] if len(out) == 1 else tuple(out)


def _run(
    op: torch._ops.OpOverload, given: dict[str, Any], tensors: list[DTensor], plan: WindowPlan
) -> list[Any]:
    mesh = tensors[0].device_mesh
    coords = coords_of(mesh)
    refuse_exchange(op.name(), plan.bytes, "exchange the borders of its windows")
    moved = iter(move_operands(op.name(), list(zip(tensors, plan.inputs, strict=True)), "windows"))
    local = {name: next(moved) if isinstance(value, DTensor) else value for name, value in given.items()}
    if coords is None:
        nothing = tensors[0]._local_tensor.new_empty(0)
        return [None if out is None else wrap(nothing, spec_of(out, mesh)) for out in plan.outputs]
    window = WINDOW_OPS[op._schema.name]
    image = window.sliding.image
    for halo in plan.halos:
        local[image] = _fetched(local[image], halo, coords[halo.axis], mesh)
    for halo in plan.halos:
        local[image] = _filled(local[image], halo, coords[halo.axis], window.fill)
    pieces = _pieces(plan, coords)
    if _is_empty(local):
        made: Sequence[Any] = _nothing(plan, window.sliding.to_image, local[image], coords)
    else:
        local.update((name, value.at(coords)) for name, value in plan.overrides)
        made = window.kernel(op, local, pieces)
    return [
        _settled(value, out, plan, coords, mesh, back=i in window.sliding.to_image)
        for i, (value, out) in enumerate(zip(made, plan.outputs, strict=True))
    ]


def _is_empty(local: dict[str, Any]) -> bool:
    return any(isinstance(value, Tensor) and not value.numel() for value in local.values())


def _pieces(plan: WindowPlan, coords: tuple[int, ...]) -> list[Piece]:
    """Every spatial dim of this rank, the cut ones and the whole ones."""
    cut = {halo.sliding.dim: halo for halo in plan.halos}
    found = []
    for sliding in plan.slides:
        halo = cut.get(sliding.dim)
        if halo is None:
            found.append(Piece(sliding, (0, sliding.made), 0, cut=False))
        else:
            coord = coords[halo.axis]
            found.append(Piece(sliding, halo.rows[coord], halo.seen[coord][0], cut=True))
    return found


def _nothing(
    plan: WindowPlan, to_image: tuple[int, ...], image: Tensor, coords: tuple[int, ...]
) -> list[Any]:
    """Zeros in place of the op's results, on a rank that makes none; its part of the exchange is to come."""
    return [
        None
        if out is None
        else image.new_zeros(image.shape if i in to_image else out.local_shape(coords), dtype=out.dtype)
        for i, out in enumerate(plan.outputs)
    ]


def _settled(
    value: Any, out: Layout | None, plan: WindowPlan, coords: tuple[int, ...], mesh: DeviceMesh, *, back: bool
) -> Any:
    if out is None or not isinstance(value, Tensor):
        return None
    if back:
        for halo in reversed(plan.halos):
            value = _returned(value, halo, coords[halo.axis], mesh)
    return wrap(value, spec_of(out, mesh))


# ------------------------------------------------------------------------------------------ the exchange


def _fetched(x: Tensor, halo: Halo, coord: int, mesh: DeviceMesh) -> Tensor:
    """The rows that this coord's windows see:  [held] -> [wanted] along the dim."""
    n, dim = len(halo.held), halo.sliding.dim
    sent = [_rows(x, halo.between(coord, reader), halo.held[coord][0], dim) for reader in range(n)]
    sizes = [_length(halo.between(holder, coord)) for holder in range(n)]
    return torch.cat(_exchanged(sent, sizes, coord, halo, mesh), dim)


def _filled(x: Tensor, halo: Halo, coord: int, fill: float) -> Tensor:
    """With what stands beyond the edges of the tensor:  [wanted] -> [seen] along the dim."""
    (low, high), wanted = halo.seen[coord], halo.wanted(coord)
    before, after = (wanted[0] - low, high - wanted[1]) if wanted[0] < wanted[1] else (high - low, 0)
    if not before and not after:
        return x
    dim = halo.sliding.dim
    edges = [x.new_full(_shape(x, dim, rows), fill) for rows in (before, after)]
    return torch.cat([edges[0], x, edges[1]], dim)


def _returned(grad: Tensor, halo: Halo, coord: int, mesh: DeviceMesh) -> Tensor:
    """The gradients of the rows that this coord holds, added up over all who saw them:  [seen] -> [held]."""
    n, dim = len(halo.held), halo.sliding.dim
    start = halo.seen[coord][0]
    sent = [_rows(grad, halo.between(holder, coord), start, dim) for holder in range(n)]
    parts = [halo.between(coord, reader) for reader in range(n)]
    received = _exchanged(sent, [_length(part) for part in parts], coord, halo, mesh)
    first, last = halo.held[coord]
    out = grad.new_zeros(_shape(grad, dim, last - first))
    for part, piece in zip(parts, received, strict=True):
        if piece.shape[dim]:
            out.narrow(dim, part[0] - first, _length(part)).add_(piece)
    return out


def _exchanged(
    sent: list[Tensor], sizes: list[int], coord: int, halo: Halo, mesh: DeviceMesh
) -> list[Tensor]:
    """What the others sent, in their order, and between it what this coord keeps."""
    n, dim = len(sent), halo.sliding.dim
    kept = sent[coord]
    if not halo.most_rows_sent:
        return [kept if i == coord else kept.narrow(dim, 0, 0) for i in range(n)]
    out = [0 if i == coord else piece.shape[dim] for i, piece in enumerate(sent)]
    back = [0 if i == coord else size for i, size in enumerate(sizes)]
    rows = torch.cat([piece.movedim(dim, 0) for i, piece in enumerate(sent) if i != coord])
    axis = axis_names(mesh)[halo.axis]
    got = exchange_rows(
        rows.contiguous(), back, out, mesh.get_group(halo.axis), axis=axis, reason="the borders of windows"
    )
    pieces = [piece.movedim(0, dim) for piece in got.split(back)]
    return [kept if i == coord else pieces[i] for i in range(n)]


def _rows(x: Tensor, rows: Interval, start: int, dim: int) -> Tensor:
    low = rows[0] - start if rows[0] < rows[1] else 0
    return x.narrow(dim, low, _length(rows))


def _length(rows: Interval) -> int:
    return rows[1] - rows[0]


def _shape(x: Tensor, dim: int, rows: int) -> list[int]:
    return [*x.shape[:dim], rows, *x.shape[dim + 1 :]]

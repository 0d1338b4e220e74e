"""Local calls of gathers and scatters where the indexed dim is cut: a rank serves the indices it holds.

A rank that looks up an index of another rank contributes zero (the sum over ranks has the value once); one
that would write it writes into an extra slot at the end of the dim, which is cut off again.

Where torch's kernels count indices below 0 from the end, so do these; elsewhere such are outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.rules.held_label import Held
from shardwright.rules.op import functional_form

Op = torch._ops.OpOverload
HeldBy = Mapping[str, Held]


def looked_up(op: Op, held: HeldBy, x: Tensor, dim: int, index: Tensor, **kwargs: Any) -> Tensor:
    """`gather` and `index_select`: zero where the index is another rank's."""
    at, here = _located(held["d"], index, from_end=False)
    out = kwargs.pop("out", None)
    found = _functional(op)(x, dim, at, **kwargs)
    if here.dim() != found.dim():
        here = here.view([-1 if d == dim % found.dim() else 1 for d in range(found.dim())])
    found = found.masked_fill_(~here, 0)
    result: Tensor = found if out is None else out.copy_(found)
    return result


def embedded(op: Op, held: HeldBy, weight: Tensor, indices: Tensor, *rest: Any) -> Tensor:
    """`embedding`: zero rows where the index is another rank's."""
    at, here = _located(held["v"], indices, from_end=False)
    found: Tensor = op(weight, at, *rest)
    return found.masked_fill_(~here.unsqueeze(-1), 0)


def table_gradient(
    op: Op, held: HeldBy, grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, by_freq: bool
) -> Tensor:
    """`embedding_dense_backward`: the gradients of the rows that are held; other uses go to one row more."""
    at, here = _located(held["v"], indices)
    at = at.masked_fill_(~here | (indices == padding_idx), num_weights)
    found: Tensor = op(grad, at, num_weights + 1, -1, by_freq)
    return found.narrow(0, 0, num_weights).contiguous()


def renormed(op: Op, held: HeldBy, weight: Tensor, indices: Tensor, *rest: Any) -> Tensor:
    """`embedding_renorm_`: of the rows that are used, those that are held."""
    at, here = _located(held["v"], indices)
    changed: Tensor = op(weight, at[here], *rest)
    return changed


def indexed(op: Op, held: HeldBy, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """`x[i, j]`: zero where any index is another rank's."""
    local, here = _located_all(held, indices)
    found: Tensor = op(x, local)
    given = [dim for dim, index in enumerate(indices) if index is not None]
    neighbours = given == list(range(given[0], given[-1] + 1))
    first = given[0] if neighbours else 0
    here = here.view([*here.shape, *[1] * (found.dim() - first - here.dim())])
    return found.masked_fill_(~here, 0)


def _located_all(held: HeldBy, indices: Sequence[Tensor | None]) -> tuple[list[Tensor | None], Tensor]:
    """The local indices, and where all that are looked at here are held."""
    local = list(indices)
    shape = torch.broadcast_shapes(*(index.shape for index in indices if index is not None))
    device = next(index.device for index in indices if index is not None)
    here = torch.ones(shape, dtype=torch.bool, device=device)
    for name, of_dim in held.items():
        index = indices[int(name[1:])]
        if index is not None:
            local[int(name[1:])], own = _located(of_dim, index)
            here = here & own
    return local, here


def _located(held: Held, index: Tensor, *, from_end: bool = True) -> tuple[Tensor, Tensor]:
    return held.locate(held.wrapped(index, from_end=from_end))


# ---------------------------------------------------------------------------------------------- writes


def scattered(op: Op, held: HeldBy, x: Tensor, dim: int, index: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
    """`scatter*`, `index_add`, `index_copy`, `index_fill`: what is another rank's goes to the extra slot."""
    at = _slotted(held["d"], index, from_end=op._schema.name.startswith("aten::index_fill"))

    out = kwargs.pop("out", None)

    def write(wider: Tensor) -> Tensor:
        return _on_slots(op, out)(wider, dim, at, *rest, **kwargs)  # type: ignore[no-any-return]

    return _through_slots(op, x, [dim % x.dim()], write, out)


def put(
    op: Op,
    held: HeldBy,
    x: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    *rest: Any,
    **kwargs: Any,
) -> Tensor:
    """`x[i, j] = values`: what is another rank's goes to the extra slots."""
    local = list(indices)
    dims = sorted(int(name[1:]) for name in held)
    for dim in dims:
        index = indices[dim]
        if index is not None:
            local[dim] = _slotted(held[f"d{dim}"], index)

    out = kwargs.pop("out", None)

    def write(wider: Tensor) -> Tensor:
        return _on_slots(op, out)(wider, local, values, *rest, **kwargs)  # type: ignore[no-any-return]

    return _through_slots(op, x, dims, write, out)


def _slotted(held: Held, index: Tensor, *, from_end: bool = True) -> Tensor:
    at, here = _located(held, index, from_end=from_end)
    return at.masked_fill_(~here, held.length)


def _through_slots(
    op: Op, x: Tensor, dims: Sequence[int], write: Callable[[Tensor], Tensor], out: Tensor | None
) -> Tensor:
    """Expanded dims stay expanded, so that the kernel does there what it does on one device."""
    in_place = op._schema.is_mutable and out is None
    sides = enumerate(zip(x.shape, x.stride(), strict=True)) if in_place else ()
    repeated = [dim for dim, (size, stride) in sides if size > 1 and not stride and dim not in dims]
    held = _once(x, repeated)
    wider = held
    for dim in dims:
        shape = list(wider.shape)
        shape[dim] = 1
        wider = torch.cat([wider, wider.new_zeros(shape)], dim)
    written = write(wider.expand([n if d in repeated else -1 for d, n in enumerate(x.shape)]))
    for dim in dims:
        written = written.narrow(dim, 0, x.shape[dim])
    if in_place:
        held.copy_(_once(written, repeated))
        return x
    return written.contiguous() if out is None else out.copy_(written)


def _once(x: Tensor, repeated: Sequence[int]) -> Tensor:
    for dim in repeated:
        x = x.narrow(dim, 0, 1)
    return x


def _on_slots(op: Op, out: Tensor | None) -> Op:
    """What writes the wider tensor, which nobody else has: the op itself, or what `out=` is a form of."""
    return op if out is None else _functional(op)


def _functional(op: Op) -> Op:
    if not op._schema.is_mutable:
        return op
    found = functional_form(op)
    assert found is not None, f"{op.name()} has no functional form"  # noqa: S101  a rule would be wrong
    return found

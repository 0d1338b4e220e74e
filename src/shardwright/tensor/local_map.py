"""`local_map`: a function on local tensors becomes a function on DTensors, by stating its placements."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwright.errors import LayoutError
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.wrap import as_ours


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Any = None,
    in_placements: Sequence[Any] | None = None,
    in_grad_placements: Sequence[Any] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """Run `func` on local tensors; DTensors go in and come out.

    Args:
        func: takes and returns local tensors.
        out_placements: per output its placements (None: a plain value); one entry serves all outputs.
        in_placements: per flattened argument the placements that it must have; None: any.
        in_grad_placements: per flattened argument the placements of its gradient.
        device_mesh: the mesh of the outputs; by default that of the first DTensor argument.
        redistribute_inputs: move inputs to `in_placements` instead of refusing them.
    Raises: LayoutError: an input with other placements, or a wrong number of placements.
    Cost: none beyond `func`, and the moves that `redistribute_inputs` asks for.
    """
    if func is None:
        return functools.partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )

    @functools.wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        flat, tree = tree_flatten(args)
        mesh = device_mesh or next((a.device_mesh for a in flat if isinstance(a, TorchDTensor)), None)
        local = [
            _enter(a, i, in_placements, in_grad_placements, redistribute=redistribute_inputs)
            for i, a in enumerate(flat)
        ]
        out = func(*tree_unflatten(local, tree), **kwargs)
        return out if mesh is None else _leave(out, out_placements, mesh)

    return mapped


def _enter(
    value: Any,
    index: int,
    wanted: Sequence[Any] | None,
    grads: Sequence[Any] | None,
    *,
    redistribute: bool,
) -> Any:
    if not isinstance(value, TorchDTensor):
        return value
    x: DTensor = as_ours(value) if not isinstance(value, DTensor) else value
    want = None if wanted is None else wanted[index]
    if want is not None and tuple(want) != tuple(x.placements):
        if not redistribute:
            raise LayoutError(
                f"local_map: argument {index} has layout {x._spec.layout}, expected {tuple(want)}; "
                "redistribute it, or pass redistribute_inputs=True"
            )
        x = x.redistribute(placements=want)
    return x.to_local(grad_placements=None if grads is None else grads[index])


def _leave(out: Any, placements: Any, mesh: DeviceMesh) -> Any:
    flat, tree = tree_flatten(out)
    per_output = _per_output(placements, len(flat))
    wrapped = [
        value if want is None else DTensor.from_local(value, mesh, want)
        for value, want in zip(flat, per_output, strict=True)
    ]
    return tree_unflatten(wrapped, tree)


def _per_output(placements: Any, count: int) -> list[Any]:
    nested = isinstance(placements, tuple) and all(
        p is None or isinstance(p, list | tuple) for p in placements
    )
    if not nested:
        return [placements] * count
    if len(placements) != count:
        raise LayoutError(f"local_map: {len(placements)} out_placements for {count} outputs")
    return list(placements)

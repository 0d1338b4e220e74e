"""Graphs that `make_fx` records of DTensors: those that are no inputs become constants of the graph.

torch's mode records an op only if it knows all tensors in it, and leaves one with a subclass that it does not
know to the subclass: our local calls would then be recorded with the example's values in place of the input's
(`torch.func.linearize` gave back the memory of its example so). A DTensor whose local tensor is an input, as
in what `torch.compile` traces, is another case: there the local calls are the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    has_proxy_slot,
    track_tensor,
)

from shardwright.compat import tree_leaves, tree_map_only
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.tensor.plain.replicated import replicate_plain
from shardwright.tensor.wrap import as_replicated


def record(run: Callable[..., Any], func: Op, args: Args, kwargs: Kwargs) -> Any:
    """The op on DTensors while torch records a graph: in the graph if one of them is in it."""
    mode = get_proxy_mode()
    if mode is None:
        return run(func, args, kwargs)
    tracer: Any = mode.tracer
    ours = [x for x in tree_leaves((args, dict(kwargs))) if isinstance(x, TorchDTensor)]
    if not any(has_proxy_slot(x, tracer) for x in ours):
        return run(func, args, kwargs)
    known = partial(_known, tracer=tracer, mesh=ours[0].device_mesh, func=func)
    args, kwargs = tree_map_only(torch.Tensor, known, (args, dict(kwargs)))
    return func(*args, **kwargs)


def _known(x: torch.Tensor, tracer: Any, mesh: DeviceMesh, func: Op) -> torch.Tensor:
    """What stands for `x` in the graph: a constant if it is no input; a plain tensor is distributed there."""
    if not has_proxy_slot(x, tracer):
        track_tensor(x, tracer.proxy(tracer.create_arg(x)), constant=None, tracer=tracer)
    if isinstance(x, TorchDTensor) or func._schema.is_mutable:
        return x
    with disable_proxy_modes_tracing():
        whole = replicate_plain(x, mesh, func)
    plain = get_proxy_slot(x, tracer).proxy
    proxy = tracer.create_proxy("call_function", _replicated_on(mesh), (plain,), {})
    track_tensor(whole, proxy, constant=None, tracer=tracer)
    return whole


def _replicated_on(mesh: DeviceMesh) -> Callable[[torch.Tensor], torch.Tensor]:
    def replicated(x: torch.Tensor) -> torch.Tensor:
        return x if isinstance(x, TorchDTensor) else as_replicated(x, mesh)

    return replicated

"""Starting a backward from a DTensor, so that what runs inside it sees DTensors as the forward did.

torch runs a function of a subclass with the subclass' `__torch_function__` switched off, and a backward keeps
that state to its end. What a backward recomputes (activation checkpointing), and what the user's own autograd
functions compute in it, would then meet parameters that compute as local tensors as mere DTensors of another
mesh. The engine takes edges of the graph in place of tensors, and edges are nobody's subclass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.comm.traced import REAL
from shardwright.compat import EnableTorchFunction
from shardwright.compat.fully_shard.parameters import managing_unit
from shardwright.errors import RuleError
from shardwright.rules.call import Args
from shardwright.tensor.autograd import Adopt, apply
from shardwright.tensor.plain import boundary
from shardwright.tensor.plain.made_gradients import laid_out


def _method(
    tensor: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """`Tensor.backward`."""
    return _backward((tensor,), gradient, retain_graph, create_graph, inputs=inputs)


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """`torch.autograd.backward`."""
    outputs, given = _sequence(tensors), _ours(grad_tensors)
    if inputs is not None:
        _refuse_managed("torch.autograd.backward(inputs=...)", _sequence(inputs))
    if inputs is not None or grad_variables is not None or not _as_edges(outputs):
        return torch.autograd.backward(
            tensors, given or None, retain_graph, create_graph, grad_variables, inputs
        )
    seeds, edges = _seeds(outputs, given), _edges(outputs)
    with EnableTorchFunction():
        return torch.autograd.backward(edges, seeds, retain_graph, create_graph)


def _grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.grad`."""
    starts, ends, given = _sequence(outputs), _sequence(inputs), _ours(grad_outputs)
    _refuse_managed("torch.autograd.grad", ends)
    asks_more = kwargs.get("materialize_grads") or kwargs.get("is_grads_batched") or args[4:]
    if asks_more or not _as_edges((*starts, *ends)):
        found = torch.autograd.grad(outputs, inputs, given or None, *args, **kwargs)
        return laid_out(found, ends)
    seeds = _seeds(starts, given)
    begin, end = _edges(starts), _edges(ends)
    with EnableTorchFunction():
        return laid_out(torch.autograd.grad(begin, end, seeds, *args, **kwargs), ends)


def _hook(func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
    """`Tensor.register_hook`."""
    _refuse_managed("Tensor.register_hook", args[:1])
    return func(*args, **kwargs)


def _refuse_managed(what: str, tensors: Sequence[Any]) -> None:
    """Raise RuleError for a parameter that `fully_shard` manages: autograd never sees it."""
    for x in tensors:
        unit = managing_unit(x) if isinstance(x, TorchDTensor) else None
        if unit is not None:
            raise RuleError(
                f"{what}: {unit.name} is a parameter of torch's fully_shard, whose gradient autograd does "
                "not bring: fully_shard sums the gathered one and puts it into .grad\n  fix: call backward() "
                "and read .grad, or use register_post_accumulate_grad_hook"
            )


def _sequence(given: Any) -> tuple[Any, ...]:
    return (given,) if isinstance(given, torch.Tensor) else tuple(given)


def _ours(gradients: Any) -> tuple[Any, ...]:
    """Gradients to start from; torch's own DTensors, with their graphs, as ours, as our graph wants them."""
    if gradients is None:
        return ()
    return tuple(apply(Adopt, g) if type(g) is TorchDTensor else g for g in _sequence(gradients))


def _as_edges(values: Sequence[Any]) -> bool:
    """May these be given as edges? torch's own errors are for what needs no gradient; a trace has none.

    A view, taken without gradients, of what wants one wants one too, and is in no graph.
    """
    if not values:
        return False
    for v in values:
        if not isinstance(v, torch.Tensor) or not v.requires_grad or _is_traced(v):
            return False
        if v.grad_fn is None and v._base is not None and v._base.requires_grad:
            return False
    return True


def _is_traced(value: torch.Tensor) -> bool:
    return isinstance(value, TorchDTensor) and type(value._local_tensor) not in REAL


def _edges(values: Sequence[torch.Tensor]) -> list[Any]:
    return [get_gradient_edge(value) for value in values]


def _seeds(
    outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """The gradients to start from: where none is given, a one that is laid out as the output."""
    seeds: list[torch.Tensor | None] = list(given) if given else [None] * len(outputs)
    return [
        torch.ones_like(output) if seed is None and _is_real_scalar(output) else seed
        for output, seed in zip(outputs, seeds, strict=True)
    ]


def _is_real_scalar(output: torch.Tensor) -> bool:
    return isinstance(output, TorchDTensor) and output.numel() == 1 and output.is_floating_point()


OWN: dict[Any, boundary.Own] = {
    torch.Tensor.backward: lambda _func, args, kwargs: _method(*args, **kwargs),
    torch.autograd.backward: lambda _func, args, kwargs: _backward(*args, **kwargs),
    torch.autograd.grad: lambda _func, args, kwargs: _grad(*args, **kwargs),
    torch.Tensor.register_hook: _hook,
}

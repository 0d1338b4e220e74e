"""Functions of torch that hand a tensor's values to the host at its address, where a wrapper has none.

`x.tolist()`, `x.numpy()`, split points that stand in a tensor: the host gets the finished logical value, as
from `x.item()`, with a record.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import DispatchKey, pack_padded_rows, pad_packed_rows
from shardwright.rules.call import Args
from shardwright.tensor.dispatch.kernels import with_keys
from shardwright.tensor.move import announce
from shardwright.tensor.wrap import as_ours, as_replicated

_WHOLE = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})
_POINTS = frozenset({torch.tensor_split, torch.Tensor.tensor_split})
# The lengths of a packed sequence, or how many rows each step has, are sizes written as a tensor: torch takes
# them on the host alone, so they are the program's own numbers, as the sizes of `view` are.
WITH_LENGTHS = frozenset(
    {pack_padded_rows, pad_packed_rows} | {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
)
READING = _WHOLE | _POINTS | WITH_LENGTHS
_READ = torch.ops.aten._local_scalar_dense.default


def with_host_values(func: Any, args: Args, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for a function in `READING`: what it reads at an address is plain.

    Raises: ImplicitRedistributionError: inside `explicit()`, a value that is not whole on every rank.
    Cost: gathering what is read.
    """
    first, *rest = args
    if func is torch.Tensor.tolist:
        return (_of_no_graph(first), *rest), kwargs
    if func in _WHOLE:
        return (_finished(first), *rest), kwargs
    if func in WITH_LENGTHS:
        second, *others = rest
        return (first, _finished(second) if is_lengths(second) else second, *others), kwargs
    return (first, *map(_points, rest)), {name: _points(value) for name, value in kwargs.items()}


def is_lengths(value: Any) -> bool:
    """Can it be the second argument of a function in `WITH_LENGTHS`, where others have states?"""
    return isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.ndim == 1


def _points(value: Any) -> Any:
    if not isinstance(value, TorchDTensor):
        return value
    if value.dtype != torch.int64:
        raise RuntimeError(f"tensor_split: points to split at have dtype int64, got {value.dtype}")
    return _of_no_graph(value).tolist()


def _finished(value: Any) -> Any:
    if not isinstance(value, TorchDTensor):
        return value
    ours = as_ours(value)
    announce(_READ.name(), ours, ours._spec.layout.replicated(), "the host reads the finished value")
    return ours.full_tensor()


def applied(_: Any, args: Args, kwargs: dict[str, Any]) -> Any:
    """`x.apply_(f)`: a Python function of each element; every rank calls it for all of them."""
    x, function = args
    return x.copy_(as_replicated(_finished(x).clone().apply_(function, **kwargs), x.device_mesh))


def exported(func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
    """`x.__dlpack__()`: other libraries read memory, and a distributed tensor has none of its own."""
    return func(_finished(args[0]), *args[1:], **kwargs)


def number(func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
    """`float(x)` and its like: `torch.tensor([x])` asks for one with dispatch to Python turned off."""
    return with_keys((DispatchKey.Python,), func, args, kwargs)


OWN: dict[Any, Any] = {torch.Tensor.apply_: applied, torch.Tensor.__dlpack__: exported} | dict.fromkeys(
    (getattr(torch.Tensor, f"__{kind}__") for kind in ("bool", "int", "index", "float", "complex")), number
)


def _of_no_graph(value: Any) -> Any:
    """The same for a function that returns numbers: it asks nothing of how they were made."""
    with torch.no_grad():
        return _finished(value)

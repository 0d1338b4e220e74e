"""A parameter that lives as a DTensor and computes as its local tensor.

Replicated and expert parameters are DTensors for everything that looks at them (optimizers, checkpoints,
norms), while the module that owns them computes on plain local tensors. The way in between belongs to the
tensor, not to the module: an op that mixes such a parameter with a tensor that is not on its mesh sees the
parameter's local tensor, differentiably. So nothing of the module is swapped, hooked or renamed; a child
called directly, a parent that reads a child's weight, tied weights, activation checkpointing and
`torch.compile(fullgraph=True)` work.

Rejected: swapping tensors in forward hooks (breaks on exceptions and re-entry), parametrizations (rename
state_dict keys), wrapping every input (a rank-local batch is no logical tensor of any mesh).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwright.tensor.autograd import Localize, apply
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.spec import LocalUse, spec_of
from shardwright.tensor.wrap import CLASSES, wrap

if TYPE_CHECKING:
    from collections.abc import Sequence


# Functions that take a loss and parameters side by side, and must see the parameters themselves.
_AUTOGRAD = frozenset({torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward})


class LocalizedDTensor(DTensor):
    """A DTensor whose use beside other tensors is its local tensor (see the module's text)."""

    __slots__: list[str] = []

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _mixes(args, tuple(kwargs.values())) and not _keeps_parameter(func, args):
            args = tuple(_localized(a) for a in args)
            kwargs = {name: _localized(value) for name, value in kwargs.items()}
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Any], flatten_spec: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> DTensor:
        return DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride)


@torch._dynamo.allow_in_graph  # type: ignore[untyped-decorator]
def compute_view(x: DTensor) -> torch.Tensor:
    """What a computation sees of a localized parameter: its local tensor (a DTensor where axes are left)."""
    return apply(Localize, x)


def _mixes(args: Sequence[Any], more: Sequence[Any]) -> bool:
    """Is a tensor among the arguments that is not itself a localized parameter?"""
    for value in (*args, *more):
        if isinstance(value, list | tuple):
            if _mixes(value, ()):
                return True
        elif _is_foreign(value, args, more):
            return True
    return False


def _is_foreign(value: Any, args: Sequence[Any], more: Sequence[Any]) -> bool:
    """A tensor that is not on the parameter's mesh; its gradient and its optimizer state are."""
    if not isinstance(value, torch.Tensor) or isinstance(value, LocalizedDTensor):
        return False
    return not isinstance(value, DTensor) or not _on_same_mesh(value, args, more)


def _on_same_mesh(other: DTensor, args: Sequence[Any], more: Sequence[Any]) -> bool:
    parameter = _first_localized((*args, *more))
    return parameter is not None and other.device_mesh == parameter.device_mesh


def _first_localized(values: Sequence[Any]) -> LocalizedDTensor | None:
    for value in values:
        if isinstance(value, LocalizedDTensor):
            return value
        if isinstance(value, list | tuple):
            found = _first_localized(value)
            if found is not None:
                return found
    return None


def _keeps_parameter(func: Any, args: tuple[Any, ...]) -> bool:
    """Functions that act on the parameter itself: autograd's entry points, and what changes it in place."""
    if func in _AUTOGRAD:
        return True
    name = getattr(func, "__name__", "")
    if name.startswith(("_foreach_", "_fused_")):
        return True
    changes = name in _CHANGING or (name.endswith("_") and not name.endswith("__"))
    return changes and bool(args) and isinstance(args[0], LocalizedDTensor)


_CHANGING = frozenset(
    {
        "__set__",
        "__setitem__",
        "__iadd__",
        "__isub__",
        "__imul__",
        "__itruediv__",
        "__ipow__",
        "__ifloordiv__",
    }
)


def _localized(value: Any) -> Any:
    if isinstance(value, LocalizedDTensor):
        return compute_view(value)
    if isinstance(value, list | tuple):
        return type(value)(_localized(v) for v in value)
    return value


def localize(x: DTensor, use: LocalUse) -> DTensor:
    """The same DTensor with a way of use: shares the local tensor, detached from autograd."""
    return wrap(x._local_tensor.detach(), spec_of(x.layout, x.device_mesh, use))


CLASSES[True] = LocalizedDTensor

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

from collections.abc import Sequence
from typing import Any

import torch

from shardwright.compat import forward_names, transforms_on
from shardwright.errors import RuleError
from shardwright.placement.base import Replicate
from shardwright.remember import memo
from shardwright.rules.call import Args
from shardwright.tensor.autograd import Localize, apply
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.move import announce
from shardwright.tensor.plain import boundary


class LocalizedDTensor(DTensor):
    """A DTensor whose use beside other tensors is its local tensor (see the module's text)."""


def call_localized(
    cls: type, func: Any, types: Any, args: Args = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Run a function of torch whose arguments hold a localized parameter: its `__torch_function__`.

    Raises: RuleError: a look-up that rescales the rows that it reads, and what `boundary.call` raises.
    """
    if not kwargs and func not in LOOKUPS and _on_one_mesh(args):
        return boundary.call(cls, func, types, args, kwargs)  # an optimizer, on parameters and states
    kwargs = kwargs or {}
    if func in LOOKUPS and kwargs.get("max_norm") is not None:
        raise RuleError(_RENORM.format(func.__name__))
    if _mixes((*args, *kwargs.values())) and not _keeps_parameter(func, args):
        if func not in LOOKUPS and not boundary.writes_first(func):
            if len(MIXING) >= _MANY:  # a program may make functions at every call
                MIXING.clear()
            MIXING.add(func)
        args = tuple(_localized(a) for a in args)
        kwargs = {name: _localized(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)
    return boundary.call(cls, func, types, args, kwargs)


_MANY = 4096
# Functions, as met, that always see the local tensors of such parameters beside plain ones.
MIXING: set[Any] = memo("functions that mix parameters with local tensors", set())
LOOKUPS = frozenset({torch.nn.functional.embedding, torch.nn.functional.embedding_bag})
_RENORM = (
    "{}: with max_norm the rows that are read are rescaled in place, and each data rank reads others: the "
    "copies of this parameter would part\n"
    "  fix: place it as a DTensor (sw.distribute_module), or rescale all rows before the forward"
)


def compute_view(x: DTensor) -> torch.Tensor:
    """What a computation sees of a localized parameter: its local tensor (a DTensor where axes are left).

    Raises: RuleError: inside a transform of `torch.func`, or with a forward derivative.
    """
    try:
        return apply(Localize, x)
    except RuntimeError as error:
        if transforms_on() or forward_names["_current_level"] >= 0:
            raise RuleError(_TRANSFORM.format(tuple(x.shape))) from error
        raise


_TRANSFORM = (
    "a parameter of shape {} computes as its local tensor, into which transforms of torch.func and "
    "derivatives forward do not follow\n  fix: give the function `parameter.to_local()`, for this rank's "
    "term of the derivative; or `torch.autograd.grad`, whose results have the parameter's layout"
)


def _on_one_mesh(values: Sequence[Any]) -> bool:
    """Are all of them numbers and DTensors of one mesh? No list is looked into: `_mixes` does."""
    mesh: Any = None
    for value in values:
        if isinstance(value, DTensor):
            if mesh is None:
                mesh = value._spec.mesh
            elif value._spec.mesh is not mesh:
                return False
        elif value.__class__ not in _NO_TENSORS:
            return False
    return True


_NO_TENSORS = frozenset({bool, int, float, complex, str, type(None), torch.dtype})


def _mixes(values: Sequence[Any]) -> bool:
    """Is a tensor among the arguments that is not on the parameter's mesh?

    Its gradient and its optimizer state are on it, and computing with them is an op on logical tensors.
    """
    tensors = list(boundary.tensors_in(values))
    parameter = next((t for t in tensors if isinstance(t, LocalizedDTensor)), None)
    return parameter is not None and any(_is_foreign(t, parameter) for t in tensors)


def _is_foreign(value: torch.Tensor, parameter: LocalizedDTensor) -> bool:
    return not isinstance(value, DTensor) or value.device_mesh != parameter.device_mesh


def _keeps_parameter(func: Any, args: Args) -> bool:
    """Functions that act on the parameter itself: autograd's entry points, and what changes it in place."""
    if func in boundary.AUTOGRAD:
        return True
    name = getattr(func, "__name__", "")
    if name.startswith(("_foreach_", "_fused_")):
        return True
    return boundary.writes_first(func) and bool(args) and isinstance(args[0], LocalizedDTensor)


def _localized(value: Any) -> Any:
    if isinstance(value, LocalizedDTensor):
        return compute_view(_without_pending(value))
    if isinstance(value, list | tuple):
        return type(value)(_localized(v) for v in value)
    return value


def _without_pending(x: DTensor) -> DTensor:
    """What a reduction over a cut parameter left unfinished is finished first: a term is not the value."""
    use = x._spec.use
    pairs = zip(x._spec.layout.axes, x._spec.layout.placements, strict=True)
    pending = {
        axis: Replicate() for axis, p in pairs if p.is_pending and use is not None and axis in use.axes
    }
    if not pending:
        return x
    target = x._spec.layout.with_placements(pending)
    announce("local use", x, target, "a pending value meets local tensors")
    return x.redistribute(pending)

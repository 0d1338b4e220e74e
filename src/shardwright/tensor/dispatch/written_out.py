"""Terms that an op wrote out of an expanded pending value: finished as what they were expanded from.

The gradient of a mean is a number per row, expanded and divided: where rows are sums over a cut, the
division writes out terms of full size. Whether anybody needs them finished is not known then, and most often
they are added to other terms. So the result remembers the call: who needs it finished finishes the numbers,
and divides again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.compat import current_graph_task_id, tree_map_only
from shardwright.rules.call import Call, TensorInfo
from shardwright.rules.propagate import Decision
from shardwright.rules.search import is_expanded
from shardwright.tensor import finished_forms
from shardwright.tensor.dispatch.ways.out import is_pointwise
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.move import move_operands
from shardwright.tensor.spec import spec_of
from shardwright.tensor.wrap import wrap


@dataclass(frozen=True, slots=True)
class _Written:
    """The call that wrote the terms, and what they were then."""

    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    small: DTensor
    local: torch.Tensor
    versions: finished_forms.Versions  # of the terms, and of what they are of


def operand_of(call: Call, decision: Decision) -> int | None:
    """The expanded pending operand whose terms the call writes out, beside nothing but numbers."""
    made = decision.outputs[0] if len(decision.outputs) == 1 else None
    if made is None or not made.pending_axes or not is_pointwise(call.op) or call.op._schema.is_mutable:
        return None
    (result,) = call.results
    if result is None or is_expanded(result):
        return None
    found = [i for i, info in enumerate(call.operands) if is_expanded(info)]
    if len(found) != 1 or any(_size(x) > 1 for i, x in enumerate(call.operands) if i != found[0]):
        return None
    return found[0] if decision.inputs[found[0]].pending_axes else None


def _size(info: TensorInfo) -> int:
    return torch.Size(info.shape).numel()


def remember(
    out: DTensor,
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    small: DTensor,
) -> None:
    """Keep with the terms how they were made: in a backward, whose tensors nobody else has."""
    in_backward = current_graph_task_id() != -1
    if in_backward and finished_forms.may_keep(out) and finished_forms.may_keep(small):
        versions = finished_forms.Versions(out, small)
        # numbers, as they are now: what goes element by element takes no lists
        args = tuple([_as_it_is(value, small) for value in args])
        kwargs = {name: _as_it_is(value, small) for name, value in kwargs.items()}
        out._written_out = _Written(func, args, kwargs, small, out._local_tensor, versions)  # type: ignore[attr-defined]


def _as_it_is(value: Any, small: DTensor) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and value is not small else value


def finished(x: DTensor, reason: str, refuse: Callable[[], None]) -> DTensor | None:
    """The finished form of such terms, by finishing what they were expanded from; it is kept.

    Raises: what `refuse` raises, inside `explicit()`.
    """
    made: _Written | None = getattr(x, "_written_out", None)
    if made is None or made.local is not x._local_tensor:
        return None
    if not made.versions.hold(x, made.small):
        return None
    layout = finished_forms.finished_layout(made.small._spec.layout)
    (local,) = move_operands(made.func.name(), [(made.small, layout)], reason, refuse=refuse)
    form = wrap(local, spec_of(layout, made.small.device_mesh))
    args, kwargs = tree_map_only(
        DTensor, lambda each: form if each is made.small else each, (made.args, dict(made.kwargs))
    )
    return finished_forms.keep(x, made.func(*args, **kwargs))

"""Pending values that were computed from another one: finished as what they are of, and computed again.

What is linear in terms makes terms, and sends nothing. But a stream that is scaled or centred is read in
other places too, and each reader would finish for itself what it has of it. So a value remembers its call,
and who needs it finished finishes what it is of, once for all that was made of that, and makes it again:

* elements that are computed with one by one (`h * w`), and terms of full size that a backward wrote out of a
  number per row (the gradient of a mean): when they are to be finished, or what they are of has been;
* statistics (`h.mean(-1)`), which are smaller than what they are of: when that has been finished, or is read
  by the same call, as where a value is centred: products come next, and need it.

What a value is of is kept as long as the value: whether it is still there must not be for garbage collectors
to say, which differ between ranks that have to send the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.compat import current_graph_task_id, tree_map, tree_map_only
from shardwright.rules.call import Args, Call, Kwargs, Op, TensorInfo
from shardwright.rules.op import is_pointwise
from shardwright.rules.propagate import Decision
from shardwright.rules.search import is_expanded
from shardwright.tensor import explicit_mode, finished_forms
from shardwright.tensor.dispatch.prepared import Derivation
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.move import move_operands
from shardwright.tensor.spec import is_of_ranks

_STATISTICS = frozenset({torch.ops.aten.mean.dim, torch.ops.aten.sum.dim_IntList})
_COPIES = frozenset({torch.ops.aten.clone.default})  # of terms: as good as they are
_LONGEST = 8  # how many calls are made again to have one value
_VALUE = object()  # stands in a call for what its result is of


@dataclass(frozen=True, slots=True)
class _Made:
    """The call that made a value.

    args, kwargs: of the call, with `_VALUE` for what the result is of.
    held: the result, what it is of, and its other operands, as they were.
    length: how many calls stand in line, this one included.
    """

    func: Op
    args: Any
    kwargs: Any
    value: DTensor
    held: _Held
    length: int
    is_statistic: bool

    def on(self, form: DTensor) -> Any:
        """The same call on the finished form of what the value is of."""
        given, named = tree_map(lambda each: form if each is _VALUE else each, (self.args, self.kwargs))
        return self.func(*given, **named)


class _Held:
    """Some tensors as they were."""

    __slots__ = ("_locals", "_others", "_versions")

    def __init__(self, out: DTensor, others: Sequence[DTensor]) -> None:
        self._others = others
        self._locals = [x._local_tensor for x in (out, *others)]
        self._versions = finished_forms.Versions(out, *others)

    def holds(self, out: DTensor) -> bool:
        """Are they still?"""
        tensors = (out, *self._others)
        same = all(x._local_tensor is local for x, local in zip(tensors, self._locals, strict=True))
        return same and self._versions.hold(*tensors)


def derivation_of(call: Call, decision: Decision, *, moves: bool) -> Derivation | None:
    """How the call computes terms of one pending operand; None: it makes no terms, or has others too.

    Args: moves: are operands moved for it?
    """
    made = decision.outputs[0] if len(decision.outputs) == 1 else None
    pending = [i for i, layout in enumerate(decision.inputs) if layout.pending_axes]
    if made is None or not made.pending_axes or len(pending) != 1 or call.op._schema.is_mutable:
        return None
    (result,), operand = call.results, call.operands[pending[0]]
    if result is None or is_expanded(result):
        return None
    if call.op in _STATISTICS:
        smaller = _size(result) < _size(operand) and not moves
        return Derivation(pending[0], True, False) if smaller else None
    if not is_pointwise(call.op) or call.op in _COPIES or result.shape != operand.shape:
        return None
    others = [info for i, info in enumerate(call.operands) if i != pending[0]]
    if is_expanded(operand):
        return None if any(_size(x) > 1 for x in others) else Derivation(pending[0], False, True)
    return None if moves else Derivation(pending[0], False, False)


def _size(info: TensorInfo) -> int:
    return torch.Size(info.shape).numel()


def in_a_backward() -> bool:
    """Is one running in this thread, and no forward inside of it, as that of a checkpoint?"""
    return current_graph_task_id() != -1 and not torch.is_grad_enabled()


def remember(
    out: DTensor, derivation: Derivation, func: Op, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor]
) -> None:
    """Keep with the terms how they were made: those that a backward writes out, and all that a forward makes.

    In a backward the others are what gradients go through, and most are added up.
    """
    value = tensors[derivation.operand]
    if derivation.writes_out != in_a_backward() or not all(map(finished_forms.may_keep, (out, value))):
        return
    if derivation.writes_out and is_of_ranks(out._spec.layout):  # its numbers may be this rank's: rows it has
        return
    others = [x for x in tensors if x is not value]
    above = _made(finished_forms.subject(value))
    length = 1 if above is None else 1 + above.length
    if length > _LONGEST or any(x._spec.use is not None for x in others):
        return
    if derivation.writes_out:  # numbers, as they are now
        copies = {id(x): x.clone() for x in others}
        args, kwargs = tree_map_only(DTensor, lambda x: copies.get(id(x), x), (args, dict(kwargs)))
        others = []
    given, named = tree_map_only(DTensor, lambda x: _VALUE if x is value else x, (args, dict(kwargs)))
    held = _Held(out, [value, *others])
    made = _Made(func, given, named, value, held, length, derivation.is_statistic)
    out._derived = made  # type: ignore[attr-defined]
    if not derivation.writes_out:
        finished_forms.ask(out)


def _made(x: DTensor) -> _Made | None:
    """How `x` was made, if that still gives `x`."""
    made: _Made | None = getattr(x, "_derived", None)
    return made if made is not None and made.held.holds(x) else None


def remembers(x: DTensor) -> bool:
    """Is it known what `x` is of?"""
    return _made(finished_forms.subject(x)) is not None


def finished(op: str, x: DTensor, reason: str, refuse: Callable[[], None]) -> DTensor | None:
    """The finished form of such terms, by finishing what they are of; it is kept.

    Statistics are finished so only where that has been: they are smaller.

    Raises: what `refuse` raises, inside `explicit()`.
    """
    if not hasattr(x, "_derived") and not x._is_view():
        return None
    line = _line(x)
    if line and not any(made.is_statistic for made in line) and not _is_finished(line[-1].value):
        _finish(op, line[-1].value, reason, refuse)
    return _again(line, x)


def finish_beside(op: str, tensors: Sequence[DTensor]) -> None:
    """Finish values whose own statistics a call reads too; make again what is of values that are finished.

    Nothing is sent inside `explicit()`, where terms stay terms.
    """
    for x in tensors:
        if x._spec.plain is x._spec or x._spec.form is not None:
            continue
        line, is_statistic = _line(x), False
        for made in line if not explicit_mode.here.explicit else ():
            value, is_statistic = made.value, is_statistic or made.is_statistic
            if is_statistic and any(value is each for each in tensors) and not _is_finished(value):
                _finish(op, value, "read beside a statistic of its own", _nothing_is_refused)
        _again(line, x)


def _nothing_is_refused() -> None:
    """Outside of `explicit()`."""


def _is_finished(x: DTensor) -> bool:
    return finished_forms.known(x) is not None


def _line(x: DTensor) -> list[_Made]:
    """How `x` was made, and what it is of, and so on, up to what is finished, or is of nothing."""
    found: list[_Made] = []
    while not _is_finished(x):
        made = _made(finished_forms.subject(x))
        if made is None:
            break
        found.append(made)
        x = made.value
    return found


def _finish(op: str, value: DTensor, reason: str, refuse: Callable[[], None]) -> None:
    of = finished_forms.subject(value)
    layout = finished_forms.finished_layout(of._spec.layout)
    (local,) = move_operands(op, [(of, layout)], reason, refuse=refuse)
    finished_forms.finished_from(value, of, local)


def _again(line: Sequence[_Made], x: DTensor) -> DTensor | None:
    """The finished form of `x`, the first of a line, by all calls from the last finished value on."""
    results = [x, *(made.value for made in line)]
    for made, result in reversed([*zip(line, results, strict=False)]):
        form = finished_forms.known(made.value)
        if form is not None:
            finished_forms.keep(finished_forms.subject(result), made.on(form))
    return finished_forms.known(x) if line else None

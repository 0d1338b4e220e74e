"""A step that nobody has synchronised: ranks agree about gradients before an optimizer reads them.

Gradients of parameters that compute as their local tensors are terms of sums, and each rank has those that
its own rows reach. An optimizer would add each up where it reads it: two ranks whose rows took other branches
would add gradients of different parameters.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwright.comm.bucket import DEFAULT_BUCKET_BYTES
from shardwright.grads.coverage import refuse_uncovered
from shardwright.grads.pending import finish_gradients
from shardwright.tensor.dtensor import read_gradient
from shardwright.tensor.explicit_mode import here

_FINISHED = (
    "_finished_gradient"  # on a parameter, from a synchronisation to the next step: which, how written
)
_COVERED = "_covered_parameters"  # on an optimizer: those, and where they lie, that were let pass
_watching: list[Any] = []


def watch_steps() -> None:
    """From here on every optimizer finishes what is pending of such parameters first."""
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(finish_unasked))


def are_finished(parameters: Iterable[TorchDTensor]) -> None:
    """Note that all ranks have agreed about the gradients of these."""
    for parameter in parameters:
        if getattr(parameter._spec, "use", None) is not None:  # torch's own class has none
            gradient = read_gradient(parameter)
            mark = vars(parameter)[_FINISHED] = None if gradient is None else (object(), gradient._version)
            if gradient is not None:  # no weak reference: torch swaps no tensor that has one
                vars(gradient)[_FINISHED] = mark


def finish_unasked(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """What `GradientSynchronizer` does, for the parameters of an optimizer that it has left out.

    Not inside `explicit()`, where what would be sent is refused one by one.
    Raises: ParallelError: as `GradientSynchronizer`, and its `synchronize`.
    Cost: as that; nothing after a synchronisation.
    """
    if torch.compiler.is_compiling() or here.explicit:
        return
    held = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, TorchDTensor)]
    _check_coverage(optimizer, held)
    pending: list[TorchDTensor] = []
    left = False
    for parameter in held:
        use = getattr(parameter._spec, "use", None)
        # One that was frozen since its backward has a gradient all the same, perhaps on this rank alone.
        if use is not None and use.summed and (parameter.is_floating_point() or parameter.is_complex()):
            pending.append(parameter)
            left |= not _is_finished(parameter)
    if left:
        finish_gradients(_named(optimizer, pending), DEFAULT_BUCKET_BYTES, agreed=False)


def _check_coverage(optimizer: Optimizer, held: list[TorchDTensor]) -> None:
    """Raise ParallelError where a gradient counts too seldom or too often; once, until one moves."""
    trained = [parameter for parameter in held if parameter.requires_grad]
    placed: list[object] = [part for p in trained for part in (p, p._spec)]
    covered = vars(optimizer).get(_COVERED, [])
    if len(placed) != len(covered) or not all(map(operator.is_, placed, covered)):
        refuse_uncovered(_named(optimizer, trained), None)
        vars(optimizer)[_COVERED] = placed


def _named(optimizer: Optimizer, parameters: list[TorchDTensor]) -> dict[str, TorchDTensor]:
    return {f"parameter {i} of {type(optimizer).__name__}": p for i, p in enumerate(parameters)}


def _is_finished(parameter: Any) -> bool:
    """Is its gradient still that of the last synchronisation, which no step has used up?

    A rank without rows has no later one, where another rank has: that it lost that one tells it to ask.
    """
    marks, gradient = vars(parameter), read_gradient(parameter)
    if _FINISHED not in marks:
        return False
    mark = marks.pop(_FINISHED)
    if mark is None or gradient is None:
        return mark is None and gradient is None
    return vars(gradient).get(_FINISHED) is mark and mark[1] == gradient._version

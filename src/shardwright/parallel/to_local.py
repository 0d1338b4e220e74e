"""`ToLocalParallel`: parameters placed as told, modules computing on local tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from shardwright.errors import ParallelError, as_several, refuse_other_kind
from shardwright.parallel.meshes import named_axes
from shardwright.parallel.place import place_parameters
from shardwright.placement.base import Pending, Placement
from shardwright.placement.convert import as_placement

Given = TorchPlacement | Sequence[TorchPlacement]


class ToLocalParallel(ParallelStyle):
    """Place a module's parameters and let it compute on their local tensors.

    Args:
        param_placement: one placement per axis, or one for all axes.
        grad_placement: the placement that the local gradient has: Partial("sum") where ranks see different
            data, Replicate where all compute the same, the parameter's own where it is cut.
    Raises: ParallelError: a gradient placement that a local tensor of that placement cannot have.
    """

    def __init__(self, param_placement: Given, grad_placement: Given) -> None:
        super().__init__()
        self.param_placement = param_placement
        self.grad_placement = grad_placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axes = named_axes(device_mesh, "ToLocalParallel", module)
        values = _per_axis(self.param_placement, axes, "param_placement")
        grads = _per_axis(self.grad_placement, axes, "grad_placement")
        for axis, value, grad in zip(axes, values, grads, strict=True):
            _check(axis, value, grad)
        summed = tuple(axis for axis, grad in zip(axes, grads, strict=True) if not grad.is_replicated)
        place_parameters(module, device_mesh, values, summed)
        return module


def _per_axis(given: Given, axes: tuple[str, ...], name: str) -> tuple[Placement, ...]:
    if isinstance(given, TorchPlacement):
        return (as_placement(given),) * len(axes)
    fix = "one placement for each axis, such as [Replicate()], or one for all"
    several = as_several(f"ToLocalParallel: {name}", given, ParallelError, fix=fix)
    if len(several) != len(axes):
        raise ParallelError(f"ToLocalParallel: {len(several)} entries of {name} for a mesh with axes {axes}")
    for each in several:
        refuse_other_kind(f"ToLocalParallel: {name}", each, TorchPlacement, ParallelError, fix=fix)
    return tuple(as_placement(p) for p in several)


def _check(axis: str, value: Placement, grad: Placement) -> None:
    fits = (
        (isinstance(grad, Pending) and grad.linear) or grad.is_replicated
        if value.is_replicated
        else grad == value
    )
    if value.is_pending or not fits:
        raise ParallelError(
            f"ToLocalParallel: axis {axis!r}: a local gradient of placement {grad!r} cannot belong to a "
            f"parameter of placement {value!r}: use Partial('sum') or Replicate() for a replicated one, "
            "its own placement for a cut one"
        )

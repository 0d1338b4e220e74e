"""Placing parameters that compute as local tensors: the mechanism below the strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from shardwright.compat import axis_names
from shardwright.errors import ParallelError
from shardwright.grads.at_steps import watch_steps
from shardwright.layout.strided import same_regions
from shardwright.parallel.meshes import is_other_view, refuse_twice
from shardwright.parallel.swap import replace_parameters
from shardwright.placement.base import Placement
from shardwright.tensor.distribute import distribute_tensor
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.localized import LocalizedDTensor
from shardwright.tensor.modules.distribute import carry_over
from shardwright.tensor.modules.more_axes import cut_over, on_more_axes, shared_by
from shardwright.tensor.modules.slots import Slot
from shardwright.tensor.modules.ties import ties_kept
from shardwright.tensor.spec import LocalUse, spec_of
from shardwright.tensor.wrap import as_ours, wrap

Source = int | None


def place_parameters(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    summed: tuple[str, ...],
    *,
    src_data_rank: Source = 0,
    skip: Callable[[nn.Parameter], bool] = lambda _: False,
) -> dict[nn.Parameter, nn.Parameter]:
    """Make every parameter a DTensor on `mesh` too, computed with as its local tensor there.

    A parameter that other axes place already (tensor parallel, another replicate) keeps those placements; one
    that is spread over the same ranks under other names (an expert) is left alone.

    Args:
        placements: one per axis of `mesh`.
        summed: axes of `mesh` on which the ranks compute different terms of the loss.
    Raises: ParallelError: an axis of `mesh` places the parameter already, `fully_shard` manages it, or a tied
        one was placed in another way under its other name. Nothing has been changed then.
    Cost: a broadcast of each parameter over each axis (none with `src_data_rank=None`).
    """
    use, cut = LocalUse(axis_names(mesh), summed), cut_over(module)

    def make(path: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if skip(parameter):
            return None
        here = replace(use, shared=shared_by(cut[parameter]))
        return placed_parameter(path, parameter, mesh, placements, here, src_data_rank, cut[parameter])

    with ties_kept(module, "a strategy"):
        return replace_parameters(module, make)


def placed_parameter(
    path: str,
    parameter: nn.Parameter,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    use: LocalUse,
    source: Source,
    cut: Iterable[str],
) -> nn.Parameter | None:
    """The parameter on one mesh more; None when it belongs to another view of these ranks."""
    watch_steps()
    watch_assignments()
    if isinstance(parameter, TorchDTensor):
        before = as_ours(parameter)
        if is_other_view(path, before.device_mesh, mesh) or _nothing_to_do(before, mesh):
            return None
        refuse_twice(path, before, axis_names(mesh))
        _refuse_sharded(path, parameter, mesh)
        value = on_more_axes(before, mesh, placements, use, source, cut)
    else:
        plain = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=source)
        value = wrap(plain._local_tensor, spec_of(plain._spec.layout, mesh, use))
    new = nn.Parameter(value, requires_grad=parameter.requires_grad)
    carry_over(parameter, new)
    return new


def _nothing_to_do(before: DTensor, mesh: DeviceMesh) -> bool:
    """On a mesh of one rank a parameter that computes locally already is complete."""
    same = set(axis_names(before.device_mesh)) & set(axis_names(mesh))
    return mesh.size() == 1 and before._spec.use is not None and not same


def _refuse_sharded(path: str, parameter: nn.Parameter, mesh: DeviceMesh) -> None:
    axis = getattr(parameter, "_fully_sharded", "")
    if axis:
        raise ParallelError(
            f"{path}: fully_shard manages this parameter on axis {axis!r} and hands out its own; place it on "
            f"{axis_names(mesh)} first and shard it then, or do both with parallelize_hsdp"
        )


def refuse_sparse_gradients(slots: Iterable[Slot]) -> None:
    """Raise ParallelError for tables whose gradients are sparse tensors: those have no placement."""
    for slot in slots:
        owner = slot.owner
        if isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.sparse and slot.get().requires_grad:
            raise ParallelError(
                f"{slot.path}: the gradient of a {type(owner).__name__} with sparse=True is a sparse tensor, "
                "which has no placement\n  fix: sparse=False, or freeze the table"
            )


_watching: list[Any] = []  # the hook of modules


def watch_assignments() -> None:
    """From here on what is assigned in the place of such a parameter computes as that did.

    By `load_state_dict(assign=True)`, say, of torch's own DTensors, which know nothing of a strategy.
    """
    if not _watching:
        _watching.append(register_module_parameter_registration_hook(_as_before))  # type: ignore[arg-type]


def _as_before(module: nn.Module, name: str, new: nn.Parameter) -> nn.Parameter | None:
    """The assigned tensor with the use of the parameter that stands there; None: it is right as it is.

    Raises: ParallelError: it lies otherwise.
    """
    old: object = module._parameters.get(name)
    if old is new or not isinstance(old, LocalizedDTensor) or not isinstance(new, TorchDTensor):
        return None
    given, lies = as_ours(new), old._spec
    if given._spec.use is not None:
        return None
    if given._spec.pending or not same_regions(given._spec.layout, lies.layout):
        raise ParallelError(
            f"{type(module).__name__}.{name}: {given._spec.layout} on {given._spec.layout.axes} is assigned "
            f"in the place of a parameter that a strategy placed, {lies.layout} on {lies.layout.axes}\n"
            "  fix: sw.distribute_tensor(it, parameter.device_mesh, parameter.placements), or "
            "load_state_dict without assign=True"
        )
    layout = given._spec.layout.with_placements(lies.layout.placements, order=lies.layout.order_names)
    made = wrap(given._local_tensor.detach(), spec_of(layout, lies.mesh, lies.use))
    return nn.Parameter(made, requires_grad=new.requires_grad)

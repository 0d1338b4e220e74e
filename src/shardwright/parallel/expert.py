"""Expert parallelism: the experts of every MoE layer are spread over one axis."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.parallel import ParallelStyle

from shardwright.compat import axis_names
from shardwright.errors import ParallelError
from shardwright.grads.stages import heard_by_stages
from shardwright.moe.cut_tokens import computes_locally
from shardwright.moe.layer import MoELayer
from shardwright.parallel.meshes import named_axes, refuse_other_order
from shardwright.parallel.pipeline.mark import is_cut
from shardwright.parallel.place import place_parameters
from shardwright.parallel.swap import put_all
from shardwright.placement.base import Placement, Replicate
from shardwright.placement.shard import Shard
from shardwright.tensor.modules.distribute import carry_over
from shardwright.tensor.modules.same_model import agreed
from shardwright.tensor.modules.slots import slots_of, unchanged_on_error
from shardwright.tensor.wrap import as_ours


class ShardMoESparseExpertsParallel(ParallelStyle):
    """Spread the experts of a `MoELayer` over one axis of the mesh, replicate them on the others.

    The experts' weights become Shard(0) on `shard_dim_name` and compute as local tensors; the layer exchanges
    tokens over that axis' group. A router that nothing placed yet is replicated on the same mesh.

    Args: shard_dim_name: the axis that the experts are spread over.
    Raises: ParallelError: not a MoELayer, no such axis, experts that do not divide by the axis.
    Cost: per step two all-to-alls of the routed tokens each way.
    """

    def __init__(self, shard_dim_name: str = "ep_shard") -> None:
        super().__init__()
        self.shard_dim_name = shard_dim_name

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_layer(module, device_mesh, self.shard_dim_name)
        if not isinstance(module, MoELayer):  # narrowed for the type checker: check_layer refuses the rest
            return module
        axes = axis_names(device_mesh)
        placements = tuple(Shard(0) if axis == self.shard_dim_name else Replicate() for axis in axes)
        if not _are_spread(module.experts, device_mesh, placements):
            _take_over(module.experts)
            place_parameters(module.experts, device_mesh, placements, axes)
        place_parameters(
            module.router,
            device_mesh,
            (Replicate(),) * len(axes),
            axes,
            skip=lambda parameter: isinstance(parameter, TorchDTensor),
        )
        group = device_mesh.get_group(self.shard_dim_name)
        module.enable_distributed_communicator(group, self.shard_dim_name)
        return module


def check_layer(module: nn.Module, mesh: DeviceMesh, axis: str) -> None:
    """Raise ParallelError for what cannot be spread; changes nothing."""
    axes = named_axes(mesh, "expert parallelism", module)
    if axis not in axes:
        raise ParallelError(f"expert parallelism: the mesh has no axis {axis!r}; its axes are {axes}")
    refuse_other_order(mesh, axis, "expert parallelism")
    if not isinstance(module, MoELayer):
        raise ParallelError(
            f"expert parallelism: {type(module).__name__} is no MoELayer; name the MoELayers in the plan"
        )
    size = mesh.size(axes.index(axis))
    if module.num_experts % size:
        raise ParallelError(
            f"expert parallelism: {module.num_experts} experts do not divide by {axis} of size {size}; "
            "choose a size that divides the number of experts"
        )
    if module.communicator is not None:
        raise ParallelError("expert parallelism: this MoELayer is spread already; apply it once")


def _are_spread(experts: nn.Module, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> bool:
    """Are they there already? They are another layer's too, and came with it."""
    return all(
        isinstance(p, TorchDTensor)
        and computes_locally(p)
        and (p.device_mesh, tuple(p.placements)) == (mesh, placements)
        for p in experts.parameters()
    )


def _take_over(experts: nn.Module) -> None:
    """Experts that an earlier replicate placed become plain again: every rank holds them whole."""
    slots = list(slots_of(experts))
    plain: dict[nn.Parameter, nn.Parameter] = {}
    for slot in slots:
        parameter = slot.get()
        if not isinstance(parameter, TorchDTensor) or parameter in plain:
            continue
        ours = as_ours(parameter)
        if not ours._spec.layout.is_fully_replicated:
            raise ParallelError(
                f"expert parallelism: {slot.path} is cut already ({ours._spec.layout}); "
                "apply parallelize_expert_parallel before the strategy that cuts the dense parameters"
            )
        made = nn.Parameter(ours._local_tensor.detach(), requires_grad=parameter.requires_grad)
        carry_over(parameter, made)
        plain[parameter] = made
    put_all(slots, plain)


def experts_of(module: nn.Module) -> set[nn.Parameter]:
    """The weights of all spread experts, with which each rank computes its own tokens."""
    layers = [m for m in module.modules() if isinstance(m, MoELayer) and m.communicator is not None]
    return {p for layer in layers for p in layer.experts.parameters()}


def spread_over(module: nn.Module, mesh: DeviceMesh) -> set[nn.Parameter]:
    """What expert parallelism has placed on all axes of a mesh: a strategy of the others leaves it alone."""
    layers = [m for m in module.modules() if isinstance(m, MoELayer) and m.communicator is not None]
    placed = {p for layer in layers for part in (layer.experts, layer.router) for p in part.parameters()}
    axes = set(axis_names(mesh))
    return {p for p in placed if isinstance(p, TorchDTensor) and axes <= set(axis_names(p.device_mesh))}


@heard_by_stages
def parallelize_expert_parallel(
    module: nn.Module, mesh_experts: DeviceMesh, expert_shard_dim: str = "ep_shard"
) -> nn.Module:
    """Spread the experts of every `MoELayer` inside `module`, in place.

    Args:
        mesh_experts: axes over all data and context ranks: `expert_mesh[["ep_replicate", "ep_shard"]]`.
        expert_shard_dim: the axis that the experts are spread over; on the others they are replicated.
    Raises: ParallelError: no MoELayer inside, no such axis, experts that do not divide, ranks with other
        parameters; nothing has been changed then.
    Cost: an all-reduce of 40 bytes over each axis, once; see `ShardMoESparseExpertsParallel`.
    """
    verb = "parallelize_expert_parallel"
    with agreed(verb, module, mesh_experts) as said:
        named_axes(mesh_experts, verb, module)
        said.options = {"expert_shard_dim": expert_shard_dim}
        layers = [child for child in module.modules() if isinstance(child, MoELayer)]
        if not layers and not is_cut(module):
            raise ParallelError(f"{verb}: no MoELayer inside {type(module).__name__}")
        for layer in layers:
            check_layer(layer, mesh_experts, expert_shard_dim)
    style = ShardMoESparseExpertsParallel(expert_shard_dim)
    with unchanged_on_error(module):
        for layer in layers:
            style._apply(layer, mesh_experts)
    return module

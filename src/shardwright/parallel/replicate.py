"""Data parallelism by replication: every rank holds the parameters, gradients are summed."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.grads.stages import heard_by_stages
from shardwright.parallel.expert import spread_over
from shardwright.parallel.meshes import named_axes
from shardwright.parallel.place import place_parameters, refuse_sparse_gradients
from shardwright.placement.base import Replicate
from shardwright.tensor.distribute import refuse_source
from shardwright.tensor.modules.same_model import agreed
from shardwright.tensor.modules.slots import slots_of


@heard_by_stages
def parallelize_replicate(module: nn.Module, mesh: DeviceMesh, *, src_data_rank: int | None = 0) -> nn.Module:
    """Replicate every parameter of `module` on all axes of `mesh`, in place.

    The forward runs unchanged on rank-local plain tensors. After a backward, `p.grad` is Pending(sum) on the
    axes of `mesh`: the ranks' terms of the gradient, to be added by `grads.GradientSynchronizer`. Write the
    loss as sum / global count (`grads.global_mean`).

    Args:
        mesh: axes over which the batch (or the sequence) is spread.
        src_data_rank: index on each axis of the rank whose values count; None: each rank's own, all equal.
    Returns: the module itself; its class, hooks, state_dict keys and tied weights are untouched.
    Raises: ParallelError: a parameter is placed on one of these axes already, ranks with other parameters;
        nothing has been changed then.
    Cost: an all-reduce of 40 bytes and a broadcast of the parameters per axis, once; nothing per step (the
        synchroniser's all-reduce).
    """
    with agreed("parallelize_replicate", module, mesh) as said:
        axes = named_axes(mesh, "parallelize_replicate", module)
        refuse_source(mesh, src_data_rank)
        refuse_sparse_gradients(slots_of(module))
        experts = spread_over(module, mesh)
        said.options, said.left_alone = {"src_data_rank": src_data_rank}, experts
    whole = (Replicate(),) * len(axes)
    place_parameters(module, mesh, whole, axes, src_data_rank=src_data_rank, skip=experts.__contains__)
    return module

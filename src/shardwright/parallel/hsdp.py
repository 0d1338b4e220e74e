"""Hybrid sharding: shard over one axis, replicate over the others."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from shardwright.errors import ParallelError
from shardwright.grads.stages import heard_by_stages
from shardwright.parallel.fsdp import asked_of, shard_over
from shardwright.parallel.fully_shard_arguments import by_name
from shardwright.parallel.meshes import named_axes
from shardwright.parallel.several import Modules, one_unit
from shardwright.tensor.modules.same_model import agreed


@heard_by_stages
def parallelize_hsdp(
    module: Modules, mesh: DeviceMesh, shard_dim: str = "dp_cp_shard", **fully_shard_kwargs: Any
) -> Modules:
    """Shard the parameters over the axis `shard_dim`, replicate them over all others of `mesh`, in place.

    As `parallelize_fsdp`, on the blocks first and then on the root.

    Args:
        module: a module, or several that are one unit.
        mesh: any number of axes, `shard_dim` among them.
        shard_dim: the axis to shard over.
        fully_shard_kwargs: see `parallelize_fsdp`.
    Raises: ParallelError: no such axis, or one that places a parameter already; nothing was changed then.
    Cost: as `parallelize_fsdp`, and an all-reduce of the sharded gradients over the replicated axes.
    """
    unit = one_unit(module)
    with agreed("parallelize_hsdp", unit, mesh) as said:
        options = by_name((), fully_shard_kwargs)
        axes = named_axes(mesh, "parallelize_hsdp", unit, options["ignored_params"])
        if shard_dim not in axes:
            raise ParallelError(f"parallelize_hsdp: the mesh has no axis {shard_dim!r}; its axes are {axes}")
        others = tuple(axis for axis in axes if axis != shard_dim)
        asked = asked_of("parallelize_hsdp", unit, mesh, (*others, shard_dim), options, said)
    shard_over(unit, mesh, asked)
    return module

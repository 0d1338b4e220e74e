"""Collectives of `torch.distributed` on distributed tensors, which say nothing that one device would do.

Their ops write what they name among their inputs, and do not say so in their schemas: taken for ops that give
new tensors they would move the operands and lose what they wrote.

Between ranks that hold the same part of such a tensor a sum or a copy of the parts is one of the tensors: it
runs on them. So torch's DistributedDataParallel keeps copies of models that tensor parallelism cuts.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from shardwright.compat import group_of, increment_versions, tree_leaves, tree_map, tree_map_only
from shardwright.errors import RuleError
from shardwright.layout.mesh_shape import as_mesh_shape
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.tensor.dtensor import DTensor

# What such an op does to tensors it does to their parts, however they are cut.
_OF_PARTS = {"allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "send", "recv_"}


def run_collective(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Run an op of a process group whose ranks hold the same part of each tensor.

    Raises: RuleError: on every rank that calls another.
    """
    name = func._schema.name.partition("::")[2]
    tensors = [x for x in tree_leaves((args, dict(kwargs))) if isinstance(x, DTensor)]
    if name not in _OF_PARTS or not _is_across(tensors, _group_of(func, args)):
        raise RuleError(
            f"{name}: a collective of torch.distributed takes what each rank has for itself, and a DTensor "
            "is one tensor of all ranks: they would disagree about it\n"
            "  fix: x.redistribute(...) or x.full_tensor(), which send what its layout asks for (a pending "
            "sum is reduced so); parallelize_replicate in place of DistributedDataParallel\n"
            "  or: the collective on x.to_local(), this rank's part"
        )
    owners = {id(x._local_tensor): x for x in tensors}
    local_args, local_kwargs = tree_map_only(DTensor, lambda x: x._local_tensor, (args, dict(kwargs)))
    out = func(*local_args, **local_kwargs)
    if name != "send":
        increment_versions([x for x in tensors if not x.is_inference()])
    return tree_map(lambda value: owners.get(id(value), value), out)


def _group_of(func: Op, args: Args) -> Any:
    """The process group among the arguments."""
    place = next(i for i, argument in enumerate(func._schema.arguments) if argument.name == "process_group")
    return group_of(args[place])


def _is_across(tensors: list[DTensor], group: Any) -> bool:
    """Have the group and the mesh of each tensor this rank in common, and no other? And is none pending?"""
    ranks, here = set(dist.get_process_group_ranks(group)), dist.get_rank()
    meshes = {as_mesh_shape(x.device_mesh) for x in tensors}
    return not any(x._spec.pending for x in tensors) and all(
        ranks & {*mesh.ranks} == {here} for mesh in meshes
    )

"""Buffers that ranks hold each for itself, and that have become different."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.comm.dtype import as_bytes
from shardwright.context.submesh import groups_above_one
from shardwright.parallel.meshes import named_axes


def differing_buffers(module: nn.Module, mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of plain buffers of which the ranks of `mesh` hold different values, in order.

    Statistics that each rank takes of its own rows (a batch norm without `parallelize_batch_norm`), a counter
    that only some ranks raise. Strategies place parameters; a plain buffer is every rank's own affair, and a
    checkpoint refuses one that differs.

    Collective over the mesh.
    Raises: ParallelError: the mesh has no axis names.
    Cost: an all-gather of some 60 bytes per buffer over each axis; the buffers themselves are read.
    """
    named_axes(mesh, "differing_buffers", module)
    said = [digests_of(module)]
    for _, group in groups_above_one(mesh):
        everybody: list[Any] = [None] * group.size()
        dist.all_gather_object(everybody, said, group=group)
        said = [one for some in everybody for one in some]
    names = dict.fromkeys(name for one in said for name in one)
    return tuple(name for name in names if len({one.get(name) for one in said}) > 1)


def digests_of(module: nn.Module) -> dict[str, int]:
    """A digest of the shape, dtype and values of each plain buffer."""
    plain = {n: b for n, b in module.named_buffers() if not isinstance(b, TorchDTensor) and not b.is_meta}
    return {name: digest_of(buffer) for name, buffer in plain.items()}


def digest_of(x: torch.Tensor) -> int:
    """64 bits of a hash of a plain tensor's shape, dtype and bytes."""
    held = as_bytes(x.detach().contiguous().cpu())
    told = f"{tuple(x.shape)} {x.dtype}".encode()
    return xxhash.xxh3_64_intdigest(held.numpy().data, seed=xxhash.xxh3_64_intdigest(told))

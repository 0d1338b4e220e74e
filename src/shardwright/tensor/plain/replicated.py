"""A plain tensor beside a DTensor: what counts as replicated, and the error for what does not."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.errors import RuleError
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.plain.boundary import helpers_allowed, is_same_everywhere
from shardwright.tensor.plain.refuse import plain_beside
from shardwright.tensor.wrap import as_replicated


def replicate_plain(x: torch.Tensor, mesh: DeviceMesh, func: torch._ops.OpOverload) -> DTensor:
    """The plain tensor as a replicated DTensor, where that is allowed.

    A single value counts as replicated; others where `helpers_allowed` says so.
    Raises: RuleError: any other plain tensor; the text names the ways out.
    """
    if is_same_everywhere(x) or helpers_allowed():
        return as_replicated(x, mesh)
    raise RuleError(plain_beside(func.name(), x))


def distributed(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A result of steps on DTensors; one that was made plain on the way is the same on every rank."""
    return x if isinstance(x, TorchDTensor) else as_replicated(x, mesh)

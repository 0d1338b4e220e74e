"""The distributed tensor: class, dispatch, autograd, factories, single-device blocks."""

from shardwright.tensor import backward as _backward  # noqa: F401 - enters itself at the boundary
from shardwright.tensor import packed_sequences as _packed  # noqa: F401 - enters itself at the boundary
from shardwright.tensor.api import distribute_tensor
from shardwright.tensor.arriving import ArrivingDTensor
from shardwright.tensor.creation import empty, full, ones, rand, randn, zeros
from shardwright.tensor.dispatch import clear_cache
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.local_map import local_map
from shardwright.tensor.localized import LocalizedDTensor
from shardwright.tensor.many import redistribute_many
from shardwright.tensor.modes import explicit
from shardwright.tensor.module import distribute_module
from shardwright.tensor.random_mode import random_mode
from shardwright.tensor.safe_globals import allow_safe_loading
from shardwright.tensor.spmd import spmd

__all__ = [
    "ArrivingDTensor",
    "DTensor",
    "LocalizedDTensor",
    "clear_cache",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explicit",
    "full",
    "local_map",
    "ones",
    "rand",
    "randn",
    "random_mode",
    "redistribute_many",
    "spmd",
    "zeros",
]

allow_safe_loading()

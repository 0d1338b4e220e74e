"""The distributed tensor: class, dispatch, autograd, factories, single-device blocks."""

from shardwright.tensor.distribute import distribute_tensor
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.explicit_mode import explicit
from shardwright.tensor.factories import empty, full, ones, rand, randn, zeros
from shardwright.tensor.install import install as _install
from shardwright.tensor.local_map import local_map
from shardwright.tensor.localized import LocalizedDTensor
from shardwright.tensor.modules.distribute import distribute_module
from shardwright.tensor.move_many import redistribute_many
from shardwright.tensor.plain.spmd import spmd
from shardwright.tensor.random.mode import random_mode
from shardwright.tensor.under_way import ArrivingDTensor

__all__ = [
    "ArrivingDTensor",
    "DTensor",
    "LocalizedDTensor",
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

_install()

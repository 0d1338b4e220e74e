"""What a file that `torch.save` wrote of a DTensor names: `torch.load(weights_only=True)` may make these.

As torch's own DTensors, which can be loaded so once `torch.distributed.tensor` is imported, ours can once
this package is. A placement class of the user's own is for the user to allow.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardwright.index.region import Box, Region
from shardwright.layout.layout import _rebuild as _layout_again
from shardwright.layout.mesh_shape import MeshShape
from shardwright.placement.base import Placement
from shardwright.placement.base import _rebuild as _placement_again
from shardwright.tensor.dtensor import _rebuild as _tensor_again
from shardwright.tensor.spec import LocalUse, Spec


def _shipped(cls: type[Placement]) -> Iterator[type[Placement]]:
    """The class and those made of it in this library."""
    yield cls
    for each in cls.__subclasses__():
        if each.__module__.startswith("shardwright."):
            yield from _shipped(each)


def allow_safe_loading() -> None:
    """Tell torch what a pickled DTensor of this library's is made of."""
    torch.serialization.add_safe_globals([_tensor_again, _layout_again, _placement_again])
    torch.serialization.add_safe_globals([Spec, LocalUse, MeshShape, Region, Box, *_shipped(Placement)])

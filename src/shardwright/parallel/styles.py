"""torch's styles, given placements of this package."""

from __future__ import annotations

import copy
from typing import Any

from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Shard as TorchShard

from shardwright.placement.shard import Shard


def for_torch(style: Any) -> Any:
    """The style with torch's own `Shard` where a dim counts from the end.

    torch's `from_local` counts such a dim from the front for objects of its own class only.
    """
    if not isinstance(style, ParallelStyle):
        return style
    made = copy.copy(style)
    for name, value in vars(style).items():
        setattr(made, name, _converted(value))
    return made


def _converted(value: Any) -> Any:
    if type(value) is Shard and value.dim < 0:
        return TorchShard(value.dim)
    if isinstance(value, ParallelStyle):
        return for_torch(value)
    if type(value) in (tuple, list):
        return type(value)(_converted(each) for each in value)
    if type(value) is dict:
        return {key: _converted(each) for key, each in value.items()}
    return value

"""What the ranks of the suite import where they share a GPU: `pytest --ranks-on cuda`.

`torch.Generator()` is the CPU's wherever tensors are made; a test that draws with one of its own means the
device of its tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwright.testing.rank_device import here

_Real = torch.Generator


class _Asked(type(_Real)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Real)

    def __call__(cls, device: Any = None) -> Any:
        return _Real(here() if device is None else device)


class _Generator(metaclass=_Asked):
    """Looks like torch's."""


torch.Generator = _Generator  # type: ignore[assignment, misc]

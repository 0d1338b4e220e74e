"""The two libraries that walk: ours, and torch's DTensor."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import tensor as theirs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwright as sw

_SIZE = 8
RANKS = 2


@dataclass(frozen=True)
class Library:
    """A module with `DTensor` and placements, and the folder whose files are its own."""

    module: Any
    folder: Path

    def square(self, cut: int | None, mesh: DeviceMesh, *, grad: bool = False) -> Any:
        """A leaf of 8 x 8, made from the local part: making it decides nothing that a walk would decide."""
        shape = [_SIZE // RANKS if dim == cut else _SIZE for dim in range(2)]
        placement = self.module.Replicate() if cut is None else self.module.Shard(cut)
        made = self.module.DTensor.from_local(torch.ones(shape), mesh, [placement])
        return made.detach().requires_grad_(grad)


OURS = Library(sw, Path(sw.__file__).parent)
TORCHS = Library(theirs, Path(dist.__file__).parent)


def world() -> DeviceMesh:
    """The mesh of one process that believes to be rank 0 of 2, on which both libraries have run one op.

    What there is by then is never collected: children share its memory as it is, and start at once.
    """
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    for library in (OURS, TORCHS):
        torch.relu(library.square(None, mesh))
    gc.freeze()
    return mesh

"""Random numbers on a tensor cut over n ranks: the counter-based generator beside the full draw.

One process that believes to be rank 0 of n (the `fake` backend). "ours" computes the numbers of this rank's
own elements, "torch" (the full draw) draws those of all ranks and keeps this rank's: the first does not grow
with the world, the second does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwright as sw
from bench.paired import HEADER, compare

_OWN = 1 << 16  # elements of one rank
_FILLS: dict[str, Callable[[torch.Tensor], object]] = {
    "uniform_": lambda x: x.uniform_(),
    "normal_": lambda x: x.normal_(),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5),
}


def run() -> None:
    """Print one line per op and world: microseconds, counter beside full."""
    torch.set_num_threads(1)
    print(HEADER.replace("ours us", "counter us").replace("torch us", "full us"))
    for world in (1, 4, 16, 64):
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        x = sw.zeros(_OWN * world, device_mesh=mesh, placements=[sw.Shard(0)])
        for name, fill in _FILLS.items():
            print(_compare(f"{name}, {world} ranks", fill, x), flush=True)
        dist.destroy_process_group()


def _compare(name: str, fill: Callable[[torch.Tensor], object], x: torch.Tensor) -> str:
    def counter() -> None:
        with sw.random_mode("counter"):
            fill(x)

    return compare(name, counter, lambda: fill(x), calls=2, turns=9).row()

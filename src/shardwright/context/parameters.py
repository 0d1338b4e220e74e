"""Where a run begins: its degrees, and the meshes that are built of them."""

from __future__ import annotations

from dataclasses import fields

import torch
import torch.distributed as dist

from shardwright.context.context import DistributedContext
from shardwright.context.degrees import Degrees
from shardwright.context.process import ProcessWorld, world_size_of_launch
from shardwright.context.registry import open_context
from shardwright.errors import MeshError, refuse_no_number


class DeviceMeshParameters(Degrees):
    """The degrees of a run, which builds its meshes of them: see `Degrees`.

    Not a mesh: no process group is made before `build`.
    """

    __slots__ = ()

    def build(self, *, device: str | None = None, timeout: float | None = None) -> DistributedContext:
        """Attach to the process group (or make it from the environment) and make every registered domain.

        Collective: every rank of the world calls it. Without a launcher the world is this one process.

        Args:
            device: "cpu" or "cuda"; by default what the process group serves, else cuda where there is one.
            timeout: seconds after which a collective that waits for a peer fails (torch's default if None).

        Raises:
            MeshError: the degrees do not multiply to the world, or no such time; before any group. Ranks give
                other degrees: on all of them, before any group of an axis.

        Cost: one group per distinct partition of the ranks; a few milliseconds each. An all-gather of seven
            numbers.
        """
        if timeout is not None:
            refuse_no_number("timeout", timeout, MeshError)
        self.check_world(world_size_of_launch())
        world = ProcessWorld.attach(device, timeout)
        self._compare(world)
        return open_context(self, world)

    def _compare(self, world: ProcessWorld) -> None:
        """Raise MeshError on all ranks where one of them has other degrees: they would make other groups."""
        names = [field.name for field in fields(self)]
        mine = torch.tensor([getattr(self, name) for name in names], device=world.device)
        told = [mine.clone() for _ in range(world.world_size)]
        if world.world_size > 1:
            dist.all_gather(told, mine)
        for name, degrees in zip(names, torch.stack(told).T.tolist(), strict=True):
            if len(set(degrees)) > 1:
                other = next(rank for rank, degree in enumerate(degrees) if degree != degrees[0])
                world.detach()
                raise MeshError(
                    f"the ranks build other meshes: {name} is {degrees[0]} on rank 0 and {degrees[other]} on "
                    f"rank {other}\n  fix: give every rank the same degrees"
                )

"""Where a run begins: its degrees, and the meshes that are built of them."""

from __future__ import annotations

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
            MeshError: the degrees do not multiply to the world, or no such time; before any group.

        Cost: one group per distinct partition of the ranks; a few milliseconds each.
        """
        if timeout is not None:
            refuse_no_number("timeout", timeout, MeshError)
        self.check_world(world_size_of_launch())
        return open_context(self, ProcessWorld.attach(device, timeout))

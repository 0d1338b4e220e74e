"""The world of this process and its meshes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.compat import axis_names
from shardwright.context.degrees import Degrees
from shardwright.context.domains import BATCH_DOMAIN, DomainSpec, as_axes, check_axes
from shardwright.context.groups import GroupCache
from shardwright.context.process import ProcessWorld
from shardwright.context.randomness import (
    at_first_forward,
    check_dropout,
    part_at_first_forward,
    refuse_own_masks,
    seed_everything,
)
from shardwright.context.submesh import as_names
from shardwright.errors import ConfigError, MeshError, refuse_other_kind, words_of


class DistributedContext:
    """One mesh per domain, all views of one root mesh; rank and device of this process.

    Made by `DeviceMeshParameters.build()`. All groups exist when it returns: `mesh_for` never communicates.
    """

    def __init__(self, parameters: Degrees, world: ProcessWorld, specs: Mapping[str, DomainSpec]) -> None:
        """Make the mesh of every domain in `specs` that fits this world. Collective.

        A domain registered for worlds of another size does not stop this one: `mesh_for` refuses it.
        """
        fix = "DeviceMeshParameters(...).build() makes one"
        refuse_other_kind("DistributedContext: parameters", parameters, Degrees, MeshError, fix=fix)
        refuse_other_kind("DistributedContext: world", world, ProcessWorld, MeshError, fix=fix)
        refuse_other_kind("DistributedContext: specs", specs, Mapping, MeshError, fix=fix)
        self.parameters = parameters
        self._world = world
        self.dropout = "own"
        self._closed = False
        self._world_group = dist.group.WORLD
        self._groups = GroupCache(world.device.type)
        self._meshes: dict[str, DeviceMesh] = {}
        self._refused: dict[str, MeshError] = {}
        for name, spec in specs.items():
            try:
                self.add_domain(name, spec)
            except MeshError as error:
                self._refused[name] = error

    @property
    def rank(self) -> int:
        """Return the rank of this process in the world."""
        return self._world.rank

    @property
    def local_rank(self) -> int:
        """Return the rank of this process on its machine."""
        return self._world.local_rank

    @property
    def world_size(self) -> int:
        """Return the number of processes."""
        return self._world.world_size

    @property
    def device(self) -> torch.device:
        """Return the device of this process."""
        return self._world.device

    @property
    def is_main(self) -> bool:
        """Return whether this is the process that reports and writes for all."""
        return self.rank == 0

    @property
    def root_mesh(self) -> DeviceMesh:
        """Return the mesh (world,) of which all others are views."""
        return self._groups.root

    @property
    def domains(self) -> tuple[str, ...]:
        """Return the names that `mesh_for` accepts."""
        return tuple(self._meshes)

    @property
    def is_open(self) -> bool:
        """Return whether it was not closed and the process group that the meshes live on still exists."""
        return not self._closed and dist.is_initialized() and dist.group.WORLD is self._world_group

    def mesh_for(self, domain: str) -> DeviceMesh:
        """Return the mesh of a domain.

        Raises:
            MeshError: no domain has this name, or its axes do not multiply to this world.
        """
        if str(domain) in self._refused:
            raise self._refused[str(domain)]
        if str(domain) not in self._meshes:
            raise MeshError(
                f"unknown domain {domain!r}; use one of {', '.join(self._meshes)}, "
                f"or register_domain({domain!r}, axes)"
            )
        return self._meshes[domain]

    def add_domain(self, name: str, spec: DomainSpec | Mapping[str, int]) -> None:
        """Make the mesh of one more domain. Collective: every rank calls it (`register_domain` does).

        Args: as those of `register_domain`.
        Raises:
            MeshError: the axes do not multiply to the world.
        """
        given: object = name
        if not isinstance(given, str) or not given:
            raise MeshError(f"add_domain: name={given!r:.60} is no text that mesh_for could be asked for")
        axes = as_axes(name, _asked(name, spec, self.parameters))
        check_axes(name, axes, self.world_size)
        self._meshes[name] = self._groups.mesh(axes)
        self._refused.pop(name, None)

    def seed(self, seed: int, *, dropout: str = "own", shared: Sequence[str] = ("cp", "tp")) -> None:
        """Seed the generators of this process, so that ranks draw alike where they must and only there.

        What is drawn from here on is the same on every rank: the weights of a model, an order of samples.
        When a module that a strategy has placed is first called, the streams of torch's generators part:
        ranks that read other samples, or hold other stages, draw other dropout masks; those that share them
        (the axes `shared`) draw the same. The first part goes on as one device would. A checkpoint holds the
        state of each rank's generators; one that is loaded before the first call is kept, and one that was
        saved before its streams parted parts at the next call.

        Args:
            seed: 0 or larger; the same on every rank.
            dropout: "own": as said; "logical": the streams never part, and masks are those of one device
                that has the whole batch, by `parallelize` or `logical_dropout`.
            shared: axes of the batch domain whose ranks draw the same. Tensor parallel ranks must, and those
                of `parallelize_context`, which draw for the whole sequence. Give `("tp",)` where you cut
                sequences by hand.
        Raises: ConfigError: no such seed, way or axis; logical dropout over stages of a pipeline.
        Cost: none; nothing is sent.
        """
        mesh = self.mesh_for(BATCH_DOMAIN)
        names = axis_names(mesh)
        shared = as_names(shared)
        unknown = [axis for axis in shared if axis not in names]
        if unknown:
            raise ConfigError(f"seed: the batch domain has no axis {unknown[0]!r}; it has {', '.join(names)}")
        check_dropout(dropout, self.parameters.pipeline_parallel)
        seed_everything(seed)
        self.dropout = dropout
        if dropout == "logical":
            at_first_forward(None, refuse_own_masks)
        else:
            own = {axis: mesh.get_local_rank(axis) for axis in names if axis not in shared}
            peers = mesh.mesh[tuple(own.get(axis, slice(None)) for axis in names)]
            part_at_first_forward(seed, [*own.values()], peers.flatten().tolist())

    def close(self) -> None:
        """Destroy the process group if this context made it; the meshes are unusable then.

        The last thing that a process does with its ranks: under the same launcher it makes no new group
        afterwards. Its ranks would find the addresses of the old one in the store, and hang or fail,
        not each time (as with torch's `destroy_process_group` and then `init_process_group`).
        """
        if self.is_open:
            self._closed = True
            self._world.detach()

    def __enter__(self) -> Self:
        """Return self, to be closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def _asked(name: str, spec: DomainSpec | Mapping[str, int], parameters: Degrees) -> Mapping[str, int]:
    """A mapping, or what a function of the degrees says. Raises: MeshError: it is none, or fails."""
    if isinstance(spec, Mapping):
        return spec
    try:
        return spec(parameters)
    except Exception as error:
        raise MeshError(
            f"domain {name!r}: {spec!r:.60} is no function of the degrees ({words_of(error)})\n"
            "  fix: {axis: size}, or lambda degrees: {axis: size}"
        ) from error

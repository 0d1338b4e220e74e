"""One stream of random numbers for the ranks that hold the same elements, where theirs are not one.

After `context.seed` ranks that read other data draw from other streams, for dropout in modules that compute
on plain tensors; and users seed ranks apart by hand, for their data. What is drawn for a DTensor is one
logical tensor all the same: a head that is initialised anew in mid-training, or noise that an optimizer adds,
must be equal on all copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.comm.record import because
from shardwright.compat import FakeTensor
from shardwright.context.randomness import draw_apart
from shardwright.errors import RuleError
from shardwright.layout.mesh_shape import as_mesh_shape
from shardwright.placement.base import Placement
from shardwright.tensor.random import mode
from shardwright.tensor.spec import coords_of

_REASON = "random numbers of a tensor whose copies draw apart"
_IN_A_GRAPH = (
    "random numbers inside a compiled graph, for a tensor of which ranks hold copies that draw from streams "
    "of their own since context.seed\n  fix: draw outside of what is compiled"
)


@contextmanager
def shared_stream(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    generator: torch.Generator | None,
    *,
    whoever_seeded: bool = False,
) -> Iterator[None]:
    """Within the block copies of one element are drawn alike: from the stream of the first that holds it.

    Args:
        placements: of what is drawn; an axis of partitions has no copies.
        generator: the caller's own, which is his to keep alike. None: the default one.
        whoever_seeded: also where no context parts streams: ranks may have been seeded apart by hand.
    Raises: RuleError: inside a compiled graph, where something would have to be sent.
    Cost: a broadcast of the generator's state (5 KiB on a CPU) over each axis that has copies, if a context
        parts the streams of those ranks, or for `whoever_seeded`; else none.
    """
    traced = torch.compiler.is_compiling()
    axes = (
        _axes_apart(mesh, placements, whoever_seeded=whoever_seeded and not traced)
        if generator is None
        else []
    )
    if axes and traced:
        raise RuleError(_IN_A_GRAPH)
    if not axes or isinstance(torch.empty(0), FakeTensor):  # nothing is drawn
        yield
        return
    own = _default_generator(mesh)
    mine = own.get_state()
    state = mine.to(mesh.device_type, copy=True)
    with because(_REASON):
        for axis in axes:
            dist.broadcast(state, group=mesh.get_group(axis), group_src=0)
    first = state.cpu()
    if torch.equal(first, mine):  # this rank is the first one, or all go on alike
        yield
        return
    own.set_state(first)
    try:
        yield
    finally:
        own.set_state(mine)


def _axes_apart(mesh: DeviceMesh, placements: Sequence[Placement], *, whoever_seeded: bool) -> list[int]:
    """The axes along which ranks hold the same elements and may draw other numbers."""
    coords, shape = coords_of(mesh), as_mesh_shape(mesh)
    if coords is None:
        return []
    copied = [axis for axis, p in enumerate(placements) if not p.is_partition and mesh.size(axis) > 1]
    return [axis for axis in copied if whoever_seeded or draw_apart(shape.line(coords, axis))]


def _default_generator(mesh: DeviceMesh) -> torch.Generator:
    """Keys of the counter generator are drawn on the CPU, whatever the device."""
    if mesh.device_type == "cuda" and not mode.is_counter():
        return torch.cuda.default_generators[torch.cuda.current_device()]
    return torch.default_generator

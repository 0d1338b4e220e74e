"""One stream of random numbers for the ranks that hold the same elements, where a context has parted theirs.

After `context.seed` ranks that read other data draw from other streams, for dropout in modules that compute
on plain tensors. What is drawn for a DTensor is one logical tensor all the same: a head that is initialised
anew in mid-training, or noise that an optimizer adds, must be equal on all copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.comm.record import because
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
    mesh: DeviceMesh, placements: Sequence[Placement], generator: torch.Generator | None
) -> Iterator[None]:
    """Within the block copies of one element are drawn alike: from the stream of the first that holds it.

    Args:
        placements: of what is drawn; an axis of partitions has no copies.
        generator: the caller's own, which is his to keep alike. None: the default one.
    Raises: RuleError: inside a compiled graph, where something would have to be sent.
    Cost: none unless a context has parted the streams of ranks that hold copies; then a broadcast of the
        generator's state (5 KiB on a CPU) over each axis that has copies.
    """
    axes = _axes_apart(mesh, placements) if generator is None else []
    if not axes:
        yield
        return
    if torch.compiler.is_compiling():
        raise RuleError(_IN_A_GRAPH)
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


def _axes_apart(mesh: DeviceMesh, placements: Sequence[Placement]) -> list[int]:
    """The axes along which ranks hold the same elements and may draw other numbers."""
    coords, shape = coords_of(mesh), as_mesh_shape(mesh)
    if coords is None:
        return []
    copied = [axis for axis, p in enumerate(placements) if not p.is_partition]
    return [axis for axis in copied if draw_apart(shape.line(coords, axis))]


def _default_generator(mesh: DeviceMesh) -> torch.Generator:
    """Keys of the counter generator are drawn on the CPU, whatever the device."""
    if mesh.device_type == "cuda" and not mode.is_counter():
        return torch.cuda.default_generators[torch.cuda.current_device()]
    return torch.default_generator

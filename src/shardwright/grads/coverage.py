"""Whether each gradient is summed over the ranks that read other rows, and counts once for each of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import axis_names, on_axes
from shardwright.compat.fully_shard.parameters import managing_unit
from shardwright.errors import ParallelError
from shardwright.grads.parameters import name_list
from shardwright.layout.mesh_shape import ranks_of
from shardwright.tensor.modules.more_axes import CutOver, cut_over, said_of
from shardwright.tensor.wrap import as_ours

_Ranks = frozenset[int]


@dataclass(frozen=True)
class _Reads:
    """Which ranks a gradient has to do with; this one is among each of them.

    held: those that hold the parameter.   added: those whose terms are added up.
    share: those that compute with other tokens of the rows that this one reads, in the parameter's program.
    """

    held: _Ranks
    added: _Ranks
    share: _Ranks

    def covers(self, other: _Reads) -> bool:
        """Is the parameter on ranks that read each of the rows for which the other's terms are added up?

        Ranks along axes are the subgroups of one grid, so that |H K| = |H| |K| / |H and K|: of `held`, and of
        those that share rows.
        """
        held, share = self.held & other.added, other.share & other.added
        return len(held) * len(share) == len(other.added) * len(held & share)


def refuse_uncovered(parameters: Mapping[str, TorchDTensor], module: nn.Module | None) -> None:
    """Raise ParallelError for parameters whose terms are added over too few ranks, or over too many.

    Where one parameter is replicated or sharded over data ranks, these read other rows; a parameter that is
    only tensor parallel there has another gradient on each of them, and nothing says that they are terms.
    Ranks that share a sequence read the same rows: what computes with all of it has its whole gradient on
    each of them, which counts once. Sends nothing.

    Args: module: that registers them, if it is known.
    """
    over: Mapping[object, CutOver] = {} if module is None else cut_over(module)  # type: ignore[assignment]
    found = {name: _reads(p, over.get(p, {}).values()) for name, p in parameters.items()}
    _refuse_counted_twice(found, frozenset(rank for reads in found.values() for rank in reads.share))
    apart = set(found.values())
    missed = {reads: [other for other in apart if not reads.covers(other)] for reads in apart}
    names = [name for name, reads in found.items() if missed[reads]]
    if names:
        reads, placed = found[names[0]], parameters[names[0]].device_mesh
        missing = {rank for other in missed[reads] for rank in other.added - other.share - reads.held}
        raise ParallelError(
            f"{name_list(names)}: placed on {axis_names(placed)} only, while the gradients of others are "
            f"summed over ranks {sorted(missing)} too, so nobody would sum these; place them over the same "
            "ranks with the strategy that places the others, or freeze them"
        )


def _refuse_counted_twice(found: Mapping[str, _Reads], shared: _Ranks) -> None:
    names = [name for name, reads in found.items() if reads.added & shared - reads.share]
    if names:
        twice = found[names[0]].added & shared - found[names[0]].share
        cut = next(name for name, reads in found.items() if reads.share & twice)
        raise ParallelError(
            f"{name_list(names)}: summed over ranks {sorted(twice)} too, which read the same rows as this "
            f"one: they share the sequence that is cut where {cut} computes, and each has the whole gradient "
            "of what is outside of that: it would count once for each\n"
            "  fix: parallelize_context of the module that holds both, or place these over axes without such "
            "ranks: mesh['dp']"
        )


def _reads(parameter: TorchDTensor, said: Iterable[_Ranks]) -> _Reads:
    """said: ranks that cut the activations of its program, from the module that registers it."""
    mesh, use, unit = parameter.device_mesh, as_ours(parameter)._spec.use, managing_unit(parameter)
    summed = use.summed if use is not None else ()
    if unit is not None:
        summed = (*unit.pending, getattr(parameter, "_fully_sharded", ""))
        said = (*said, *said_of(unit.owner, unit.name).values())
    share = frozenset((dist.get_rank(), *(use.shared if use is not None else ()))).union(*said)
    return _Reads(_along(mesh, axis_names(mesh)), _along(mesh, summed), share)


def _along(mesh: DeviceMesh, wanted: Collection[str]) -> _Ranks:
    """This rank, and those that it meets along the wanted axes of a mesh."""
    axes = tuple(axis for axis in axis_names(mesh) if axis in wanted)
    return frozenset((dist.get_rank(), *(ranks_of(on_axes(mesh, axes)) if axes else ())))

"""Which gradients are summed together in a backward, and in which order: once for the same parameters.

A bucket holds parameters whose terms are summed over the same ranks. Every rank plans the same buckets in the
same order, from the parameters alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import DisableTorchFunctionSubclass
from shardwright.grads.alike import Crowd, crowds_of
from shardwright.grads.entry import Entry
from shardwright.grads.grid import GridOfRanks, grid_of
from shardwright.tensor.dtensor import read_gradient
from shardwright.tensor.spec import Spec
from shardwright.tensor.wrap import as_ours


@dataclass(frozen=True)
class Kind:
    """What the parameters of a bucket have in common: the ranks whose terms are summed, and as what."""

    ranks: GridOfRanks
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True)
class Summed(Entry):
    """pending: per axis of its mesh, whether its gradient is summed over it.

    usual: the spec of a gradient that was just that term: in most steps the next one has it too.
    """

    pending: tuple[bool, ...]
    usual: Spec | None = None

    def usual_term(self) -> Tensor | None:
        """This rank's term, if its gradient is the usual one."""
        if self.usual is None:
            return None
        with DisableTorchFunctionSubclass():
            gradient = read_gradient(self.parameter)
        if not isinstance(gradient, TorchDTensor) or gradient._spec is not self.usual:
            return None
        return gradient._local_tensor


@dataclass
class Bucket:
    """Parameters whose terms travel together, in this order.

    sizes: the numbers of elements of their terms.
    tells: it is the last of its kind: its tail says of each parameter of the kind whether this rank has a
    term, whether it has a gradient that is none, and whether it got a term once more after the first was
    sent; so it waits for the end of the backward.
    asks: it is the last of its ranks: the end of its tail says what this rank has of these, which nobody
    sums.
    memory: of the last message, whose views were gradients; the next one's, if none of them is left.
    """

    kind: Kind
    members: list[Summed] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    nbytes: int = 0
    tells: list[Summed] | None = None
    asks: Crowd | None = None
    memory: Tensor | None = None

    def add(self, entry: Summed) -> int:
        """Put a parameter at the end. Returns: its place."""
        local = entry.placed._local_tensor
        self.members.append(entry)
        self.sizes.append(local.numel())
        self.nbytes += local.nbytes
        return len(self.members) - 1


@dataclass(frozen=True)
class Plan:
    """The buckets in the order in which they are sent.

    place: by the id of a parameter, the number of its bucket and its place there.
    left: parameters whose gradients nobody sums here, by the ranks that they live on.
    """

    buckets: list[Bucket]
    place: dict[int, tuple[int, int]]
    left: list[Crowd]


def planned(parameters: Mapping[str, TorchDTensor], bucket_bytes: int) -> Plan:
    """Put the parameters into buckets, the last ones first, as the backward goes.

    Args:
        parameters: {name: parameter}, the same on every rank.
        bucket_bytes: of the gradients that are sent together.
    """
    buckets: list[Bucket] = []
    last: dict[Kind, Bucket] = {}
    told: dict[Kind, list[Summed]] = {}
    left = dict(parameters)
    for name, parameter in list(parameters.items())[::-1]:
        entry = _summed(name, parameter)
        if entry is None:
            continue
        del left[name]
        kind = _kind_of(entry)
        told.setdefault(kind, []).append(entry)
        bucket = last.get(kind)
        if bucket is None or bucket.nbytes + entry.placed._local_tensor.nbytes > bucket_bytes:
            bucket = last[kind] = Bucket(kind)
            buckets.append(bucket)
        bucket.add(entry)
    for kind, bucket in last.items():
        bucket.tells = told[kind]
    crowds = crowds_of(left)
    _let_ask(buckets, crowds)
    buckets.sort(key=lambda bucket: bucket.tells is not None)  # what waits stands in nobody's way
    place = {
        id(entry.parameter): (number, at)
        for number, bucket in enumerate(buckets)
        for at, entry in enumerate(bucket.members)
    }
    return Plan(buckets, place, list(crowds.values()))


def _let_ask(buckets: list[Bucket], left: Mapping[frozenset[int], Crowd]) -> None:
    """Let the last bucket of some ranks ask about what else they have."""
    last = {bucket.kind.ranks.members: bucket for bucket in buckets if bucket.tells is not None}
    for ranks in last.keys() & left.keys():
        last[ranks].asks = left[ranks]


def _summed(name: str, parameter: TorchDTensor) -> Summed | None:
    """None: its gradient is complete on each rank, or nobody knows before the backward what it will be."""
    placed = as_ours(parameter)
    spec = placed._spec
    if spec.use is None or getattr(parameter, "_spec", None) is not spec:
        return None
    layout = spec.layout
    pending = tuple(
        axis in spec.use.summed and placement.is_replicated
        for axis, placement in zip(layout.axes, layout.placements, strict=True)
    )
    return Summed(name, parameter, placed, pending) if any(pending) else None


def _kind_of(entry: Summed) -> Kind:
    spec = entry.placed._spec
    return Kind(grid_of(spec.mesh, entry.pending), spec.layout.dtype, entry.placed.device)

"""From torch's placement objects to ours."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor.placement_types import Partial as TorchPartial
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import Replicate as TorchReplicate
from torch.distributed.tensor.placement_types import Shard as TorchShard

from shardwright.errors import PlacementError, words_of
from shardwright.placement.base import OWN_CLASSES, Placement, Replicate
from shardwright.placement.interleaved import Interleaved
from shardwright.placement.partial import Partial
from shardwright.placement.shard import Shard

_REPLICATE = Replicate()


def as_placement(placement: Any) -> Placement:
    """Our object for a placement of torch's; ours unchanged. The private strided shard is `Interleaved`.

    Raises: PlacementError: not a placement, one of torch's whose meaning is not known here, or no value.
    """
    kind = type(placement)
    if kind in OWN_CLASSES:
        own: Placement = placement
        return own
    if isinstance(placement, Placement):
        return _value(placement)
    if kind is TorchShard:
        return Shard(placement.dim)
    if kind is TorchReplicate:
        return _REPLICATE
    if kind is TorchPartial:
        return Partial(placement.reduce_op)
    return _from_private(placement)


# Pending norms of torch, whose terms are norms of parts: of order 1 they add up.
_NORMS = {1: Partial("sum"), 2: Partial("norm2")}


def _from_private(placement: Any) -> Placement:
    """torch's strided shard and norm, recognised by what they say of themselves."""
    split_factor = getattr(placement, "split_factor", None)
    if isinstance(placement, TorchPlacement) and split_factor is not None:
        dim: int = placement.dim  # type: ignore[attr-defined]
        return Interleaved(dim, int(split_factor)) if split_factor != 1 else Shard(dim)
    if isinstance(placement, TorchPartial):
        if (order := getattr(placement, "norm_type", None)) in _NORMS:
            return _NORMS[order]
        raise PlacementError(
            f"{placement!r} ({type(placement).__name__}) is pending in a way that only torch can finish\n"
            "  fix: on torch's tensor, x.redistribute(placements=[Replicate()] * x.device_mesh.ndim), first"
        )
    raise PlacementError(
        f"{placement!r} ({type(placement).__name__}) is not a placement that can be used here; "
        "use Shard, Replicate, Partial, or subclass Partition or Pending"
    )


class _Stranger(Placement):
    """Equal to nothing else."""


_STRANGER = _Stranger()


def _value(placement: Placement) -> Placement:
    """The placement of a class of somebody else's, if tables can hold it beside others."""
    kind = type(placement).__name__
    if type(placement).__hash__ is None:
        raise PlacementError(f"{kind} cannot be hashed: declare it with @dataclass(frozen=True)")
    try:
        hash(placement)
        alike, itself = placement == _STRANGER, placement == placement  # noqa: PLR0124 - a class may say no
    except Exception as error:
        raise PlacementError(
            f"{kind} is not a value that can be hashed and compared: {words_of(error)}; its "
            "attributes are values too (a tuple in place of a list), and it is unequal to other classes"
        ) from error
    if alike or not itself:
        what = "equal to a placement of another class" if alike else "not equal to itself"
        raise PlacementError(f"{kind} is {what}: leave __eq__ and __hash__ to @dataclass(frozen=True)")
    if not (placement.is_partition or placement.is_pending or placement.is_replicated):
        raise PlacementError(f"{kind} does not say what ranks hold: subclass Partition or Pending")
    for name, value in placement._state().items():
        if any(isinstance(x, Tensor) for x in (value if isinstance(value, tuple) else (value,))):
            raise PlacementError(f"{kind}.{name} holds a tensor, which is no value: tuple({name}.tolist())")
    return placement

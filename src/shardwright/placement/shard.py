"""`Shard(dim)`: consecutive pieces of one dim, as `torch.chunk` cuts them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Shard as TorchShard

from shardwright.errors import PlacementError
from shardwright.index.assemble import check_dim
from shardwright.index.region import Shape
from shardwright.index.runs import Runs, interval
from shardwright.placement.along_dim import AlongDim
from shardwright.placement.base import HeldBy, Placement, _rebuild


def chunk_bounds(length: int, n: int, coord: int) -> tuple[int, int]:
    """Start and stop of piece `coord` of `n`: pieces of ceil(length / n), the last ones short or empty."""
    piece = -(-length // n)
    return min(coord * piece, length), min((coord + 1) * piece, length)


class Shard(TorchShard, AlongDim):
    """Coord i holds piece i of `torch.chunk(x, n, dim)`, empty where there are fewer pieces.

    Equal to, hashed like, and an instance of torch's `Shard`.
    Args: dim: of the tensor, counted from the last if negative.
    Raises: PlacementError: it is no number.
    """

    def __init__(self, dim: int) -> None:
        try:
            TorchShard.__init__(self, dim)
        except TypeError:
            raise PlacementError(f"Shard: dim={dim!r:.60} is no number of a dim, such as 0 or -1") from None

    def runs(self, length: int, n: int, coord: int) -> Runs:
        """One interval."""
        return interval(*chunk_bounds(length, n, coord))

    def local_length(self, length: int, n: int, coord: int) -> int:
        """Length of the piece."""
        start, stop = chunk_bounds(length, n, coord)
        return stop - start

    @classmethod
    def names(cls, held: HeldBy, length: int, n: int) -> Iterable[Shard]:  # noqa: ARG003 - there is one
        """The one of dim 0."""
        return (cls(0),)

    def even(self, shape: Shape, n: int) -> bool:
        """Whether the axis divides the dim."""
        return shape[self.dim] % n == 0

    def moved(self, dim: int) -> Shard:
        """The same split of another dim."""
        return Shard(dim) if type(self) is Shard else self._at(dim)

    def _at(self, dim: int) -> Shard:
        """Of a class whose constructor is not known: the same with another dim."""
        placement: Shard = type(self).__new__(type(self))
        placement._restore({"dim": dim, **self._state()})
        return placement

    def split(self, x: Tensor, n: int, coord: int) -> Tensor:
        """The piece, a view of `x`."""
        dim = check_dim(self.dim, x.dim(), self.text())
        start, stop = chunk_bounds(x.shape[dim], n, coord)
        return x.narrow(dim, start, stop - start)

    def join(self, locals: Sequence[Tensor], shape: Shape) -> Tensor:  # noqa: A002 - the word of the laws
        """The pieces one after another."""
        if sum(part.shape[self.dim] for part in locals) != shape[self.dim]:
            return super().join(locals, shape)  # its error names the part that does not fit
        return torch.cat(list(locals), self.dim)

    def text(self) -> str:
        """How the text of a layout names this placement."""
        return f"Shard({self.dim})"

    def __eq__(self, other: object) -> bool:
        """Equal to a `Shard` of the same dim, torch's included; a subclass may mean something else."""
        kind = type(other)
        if kind is not type(self) and (kind is not TorchShard or type(self) is not Shard):
            return False
        if self.dim != other.dim:  # type: ignore[attr-defined]
            return False
        return type(self) is Shard or bool(self._state() == other._state())  # type: ignore[attr-defined]

    __hash__ = TorchShard.__hash__
    __repr__ = TorchShard.__repr__
    __str__ = TorchShard.__str__

    def _restore(self, state: dict[str, Any]) -> None:
        """The dim is torch's attribute, the others are those that a subclass adds."""
        TorchShard.__init__(self, state["dim"])
        super()._restore({name: value for name, value in state.items() if name != "dim"})

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """torch's own text of this class; of a subclass, what makes it again."""
        if type(self) is Shard:
            made: tuple[str, dict[str, Any]] = super().__fx_repr__()  # type: ignore[no-untyped-call]
            return made
        return Placement.__fx_repr__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        if type(self) is Shard:
            return type(self), (self.dim,)
        return _rebuild, (type(self), {"dim": self.dim, **self._state()})

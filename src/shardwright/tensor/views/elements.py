"""Views that change what an element is: real and complex numbers, conjugates, negatives.

The local result is the op itself on what the view is of the local tensor. What is written into a copy is put
back as elements of the base.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from shardwright.compat import neg_view
from shardwright.index.view import View, selected
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import Coords
from shardwright.views.local import LocalView, local_view, noted_as
from shardwright.views.through import through

# Each of them undoes itself or another one.
_UNDO: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "aten::_conj": torch.conj,
    "aten::_neg_view": neg_view,
    "aten::view_as_complex": torch.view_as_real,
    "aten::view_as_real": lambda values: torch.view_as_complex(values.contiguous()),
}


@dataclass(frozen=True, slots=True, eq=False)
class ElementView:
    """An op on elements, of what a view is of one local tensor; `shape` is that of the result."""

    op: torch._ops.OpOverload
    view: LocalView
    shape: tuple[int, ...]
    overlaps: ClassVar[bool] = False  # such an op sees every element once

    @property
    def nothing(self) -> bool:
        """Whether it sees no element."""
        return self.view.nothing

    def take(self, local: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """The local result, and whether it is a copy."""
        taken, copied = self.view.take(local)
        if self.nothing:
            pair = taken.new_empty((*taken.shape, 2)) if self._pairs else taken
            made = self._of(pair)
            return noted_as(made, made.new_empty(self.shape)), False
        try:
            return self._of(taken), copied
        except RuntimeError:  # the local strides tear pairs apart, although the logical ones do not
            return self._of(taken.contiguous()), True

    @property
    def _pairs(self) -> bool:
        return self.op._schema.name == "aten::view_as_complex"

    def _of(self, taken: torch.Tensor) -> torch.Tensor:
        out: Any = self.op(taken)
        made: torch.Tensor = out
        return made

    def put(self, local: torch.Tensor, values: torch.Tensor) -> None:
        """Write the elements of the result to where they are in a local source, in place."""
        if not self.nothing:
            self.view.put(local, _UNDO[self.op._schema.name](values))


@dataclass(frozen=True, slots=True, eq=False)
class PairView:
    """Complex numbers whose two parts are on one rank, wherever they lie there: a copy."""

    real: LocalView
    imaginary: LocalView
    overlaps: ClassVar[bool] = False  # every number is seen once

    @property
    def nothing(self) -> bool:
        """Whether it sees no element."""
        return self.real.nothing

    def take(self, local: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """The local result, and whether it is a copy."""
        return torch.complex(self.real.take(local)[0], self.imaginary.take(local)[0]), not self.nothing

    def put(self, local: torch.Tensor, values: torch.Tensor) -> None:
        """Write the elements of the result to where they are in a local source, in place."""
        self.real.put(local, values.real)
        self.imaginary.put(local, values.imag)


def halves(layout: Layout) -> tuple[View, View]:
    """The two indices of the last dim, whose elements are one complex number."""
    last = len(layout.shape) - 1
    return selected(layout.shape, last, 0), selected(layout.shape, last, 1)


def tears(layout: Layout) -> bool:
    """Whether a rank holds one half of a complex number and not the other."""
    real, imaginary = (through(layout, view, layout.dtype, None) for view in halves(layout))
    coords = map(layout.coords_of, layout.ranks)
    return real != imaginary and any(real.region(at) != imaginary.region(at) for at in coords)


def pair_view(layout: Layout, coords: Coords) -> PairView:
    """What a complex view is of the local tensor, where its last dim is cut and no number is torn."""
    real, imaginary = halves(layout)
    target = through(layout, real, layout.dtype, None)
    return PairView(local_view(layout, target, real, coords), local_view(layout, target, imaginary, coords))

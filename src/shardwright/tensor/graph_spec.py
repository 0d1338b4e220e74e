"""The spec of a tensor whose sizes are symbols: what a graph is traced with that is to hold for other sizes.

Whoever asks it for a number gets that of the example, and the graph holds for this number alone: torch guards
it, and makes another graph for another one. So whatever does not know of symbols is right without knowing
them. What holds for any size asks for `shown`, or takes the symbols as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwright.compat import TensorMeta
from shardwright.compat.dynamo import trace_again_with_numbers, with_numbers
from shardwright.compat.symbols import at, has_symbols
from shardwright.index.stride import contiguous_stride, ordered_stride
from shardwright.layout.layout import Layout
from shardwright.tensor.spec import Spec, SpecKind, Token, spec_of

Sizes = tuple[Any, ...]  # integers, and symbols that are used like them


class GraphSpec(Spec):
    """Of symbolic sizes. Not hashed or compared as it is: both are questions about numbers.

    shown: of the sizes of the example: for what sizes play no part in. sizes: the symbols. repeats: it shows
    more elements than it would move, as numbers tell.
    """

    sizes: Sizes
    repeats = False

    def __init__(self, shown: Spec, kind: SpecKind, sizes: Sizes, stride: Sizes | None = None) -> None:
        own = kind.layouts
        if stride is None:
            stride = contiguous_stride(sizes) if own.rows else ordered_stride(sizes, own.stride_order)
        self.__dict__.update(kind.fields, shown=shown, sizes=sizes, _own_token=Token(self))
        self.__dict__["tensor_meta"] = TensorMeta(torch.Size(sizes), stride, own.dtype)

    def fix(self) -> Spec:
        """That of the numbers, for which alone the graph holds from here on."""
        known: Spec | None = self.__dict__.get("_fixed")
        if known is None:
            trace_again_with_numbers(self.sizes)
            for size in self.sizes:
                int(size)
            known = self.__dict__["_fixed"] = self.shown
        return known

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        """As `fix`."""
        return self.fix().layout

    @property
    def token(self) -> Token:  # type: ignore[override]
        """That of `fix` once somebody asked for numbers, before that one of which nothing is known."""
        known: Token = self.fix().token if "_fixed" in self.__dict__ else self.__dict__["_own_token"]
        return known

    @property
    def plain(self) -> Spec:  # type: ignore[override]
        """Itself: no finished form of it is kept."""
        return self

    @property
    def form(self) -> None:
        """None is kept."""

    @property
    def _hash(self) -> int:  # type: ignore[override]
        return hash(self.fix())

    def asking(self, form: Any = None) -> Spec:
        """As `fix`."""
        return self.fix().asking(form)

    def at(self, number: Callable[[str], int]) -> Spec:
        """The spec of the sizes where each symbol is the number that its name is given."""
        shape = tuple(at(size, number) for size in self.sizes)
        return spec_of(self.shown.layout.with_shape(shape), self.mesh, self.use)

    def placed(self, change: Callable[[Layout], Layout]) -> Spec:
        """The same sizes in another layout, which `change` makes of the one that is shown."""
        return of_sizes(spec_of(change(self.shown.layout), self.mesh, self.use), self.sizes)


def of_sizes(shown: Spec, sizes: Sequence[Any], stride: Sequence[Any] | None = None) -> Spec:
    """The spec of these sizes; `shown` itself where they are numbers, or where a placement looks at them."""
    if not has_symbols(sizes):
        return shown
    if shown.kind is None or with_numbers():
        for size in sizes:
            int(size)
        return shown
    return GraphSpec(shown, shown.kind, tuple(sizes), None if stride is None else tuple(stride))

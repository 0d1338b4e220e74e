"""The table of many layouts: what each parameter of a model is, and what one rank holds of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from rich.table import Table

from shardwright.layout.dtypes import dtype_name
from shardwright.layout.of_tensor import layout_if_any
from shardwright.show.console import render


@dataclass(frozen=True)
class Row:
    """One tensor: sizes are logical; `local` and `local_bytes` are those of its mesh's first rank."""

    name: str
    shape: tuple[int, ...]
    layout: str
    mesh: str
    local: tuple[int, ...]
    local_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class LayoutTable:
    """Rows in the order given. Shown by rich as a table; `.text` is the same without color."""

    rows: tuple[Row, ...]

    @property
    def local_bytes(self) -> int:
        """Bytes that the first rank holds of all tensors."""
        return sum(row.local_bytes for row in self.rows)

    @property
    def total_bytes(self) -> int:
        """Bytes of all logical tensors."""
        return sum(row.total_bytes for row in self.rows)

    def __rich__(self) -> Table:
        table = Table("name", "shape", "layout", "mesh", "local shape", show_footer=True)
        table.columns[0].footer = f"{len(self.rows)} tensors"
        table.add_column("bytes per rank", f"{self.local_bytes:,}", justify="right")
        table.add_column("bytes", f"{self.total_bytes:,}", justify="right")
        for row in self.rows:
            sizes = f"{row.local_bytes:,}", f"{row.total_bytes:,}"
            layout = row.layout.replace("[", "\\[")  # rich reads `[...]` as markup
            table.add_row(row.name, _shape(row.shape), layout, row.mesh, _shape(row.local), *sizes)
        return table

    @property
    def text(self) -> str:
        """The table without color, as wide as its longest row needs."""
        widest = max((len(row.name) + len(row.layout) + len(row.mesh) for row in self.rows), default=0)
        return render(self, width=widest + 120)


def layout_table(tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> LayoutTable:
    """A table of layouts, or of tensors that have one; a plain tensor is shown as not distributed.

    Args: tensors: by name, in the order of the rows.
    """
    items = tensors.items() if hasattr(tensors, "items") else tensors
    return LayoutTable(tuple(_row(name, value) for name, value in items))


def _row(name: str, value: Any) -> Row:
    layout = layout_if_any(value)
    if layout is None:
        shape, size = tuple(value.shape), prod(value.shape) * value.dtype.itemsize
        return Row(name, shape, f"{dtype_name(value.dtype)}{list(shape)}", "plain", shape, size, size)
    local = layout.local_shape(layout.coords_of(layout.ranks[0]))
    mesh = ", ".join(f"{axis}={size}" for axis, size in zip(layout.axes, layout.sizes, strict=True))
    held, whole = prod(local) * layout.itemsize, layout.numel * layout.itemsize
    return Row(name, layout.shape, str(layout), mesh, local, held, whole)


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"

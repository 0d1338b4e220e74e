"""Pictures of a layout: who holds what, as text for a terminal and as SVG and HTML for a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.errors import LayoutError
from shardwright.layout.layout import Layout
from shardwright.layout.of_tensor import layout_if_any
from shardwright.show.console import render
from shardwright.show.holders import Holders, color_of, holders_of, ranks_text
from shardwright.show.svg import draw, draw_lines

_SPANS = 32  # per dim: more do not fit a terminal, and are counted instead


@dataclass(frozen=True)
class Picture:
    """One layout, drawn. Shown by notebooks as HTML and by rich in color."""

    layout: Layout

    def __rich__(self) -> RenderableType:
        return Group(Text(_title(self.layout), style="bold"), self._body(), *map(Text, _notes(self.layout)))

    def _body(self) -> RenderableType:
        if len(self.layout.shape) > 2:
            return _per_rank(self.layout)
        return _grid(holders_of(self.layout, limit=_SPANS))

    @property
    def text(self) -> str:
        """The picture without color, 110 columns wide or less."""
        return render(self)

    @property
    def svg(self) -> str:
        """A drawing of a tensor of up to two dims; of more, the text."""
        if len(self.layout.shape) > 2:
            return draw_lines(self.text.splitlines())
        return draw(holders_of(self.layout, limit=_SPANS), _title(self.layout), _notes(self.layout))

    @property
    def html(self) -> str:
        """The SVG as a figure, with the layout's text as its caption."""
        if len(self.layout.shape) > 2:
            return f"<pre>{escape(self.text)}</pre>"
        return f"<figure>{self.svg}<figcaption>{escape(_title(self.layout))}</figcaption></figure>"

    def _repr_html_(self) -> str:
        return self.html


def visualize(x: Any) -> Picture:
    """Print who holds what of a layout or of anything that has one, and return the picture.

    One or two dims: a grid of blocks with their ranks; more: a table of the ranks. No communication.
    Raises: LayoutError: a plain tensor.
    """
    layout = layout_if_any(x)
    if layout is None:
        raise LayoutError(f"a plain {type(x).__name__} has no layout to draw; distribute it first")
    picture = Picture(layout)
    Console().print(picture)
    return picture


def _title(layout: Layout) -> str:
    mesh = " x ".join(f"{axis}={size}" for axis, size in zip(layout.axes, layout.sizes, strict=True))
    return f"{layout} on {mesh}"


def _notes(layout: Layout) -> list[str]:
    """What a grid of ranks does not show."""
    notes = [
        f"{layout.axes[axis]}: each of its ranks holds a term, the value is {layout.placements[axis].text()}"
        for axis in layout.pending_axes
    ]
    if layout.numel == 0:
        notes.append("the tensor has no elements")
    return notes


def _grid(holders: Holders) -> Table:
    """Rows are spans of dim 0, columns spans of dim 1; a 1-d tensor is one row."""
    rows = holders.spans[0] if len(holders.spans) == 2 else ((0, 1),)
    columns = holders.spans[-1] if holders.spans else ((0, 1),)
    left_out = holders.cut_off
    table = Table(show_lines=True)
    table.add_column("" if len(holders.spans) < 2 else "dim 0 \\ dim 1")
    for column in columns:
        table.add_column(_span(column), justify="center")
    for i, row in enumerate(rows):
        blocks = [_block(holders, i, j) for j in range(len(columns))]
        cells = [Text(ranks_text(held), style=f"black on {color_of(held)}") for held in blocks]
        table.add_row(_span(row) if len(holders.spans) == 2 else "ranks", *cells)
    if any(left_out):
        table.caption = "not shown: " + ", ".join(f"{n} more on dim {d}" for d, n in enumerate(left_out) if n)
    return table


def _block(holders: Holders, row: int, column: int) -> tuple[int, ...]:
    block = (row, column)[2 - len(holders.spans) :] if holders.spans else ()
    return holders.at(block)


def _span(span: tuple[int, int]) -> str:
    return str(span[0]) if span[1] == span[0] + 1 else f"{span[0]}:{span[1]}"


def _per_rank(layout: Layout) -> Table:
    table = Table("rank", "coords", "local shape", "holds")
    for rank in layout.ranks[:_SPANS]:
        coords = layout.coords_of(rank)
        boxes = [", ".join(_span((o, o + s)) for o, s in zip(b.offset, b.size, strict=True)) for b in
                 layout.region(coords).boxes[:4]]  # fmt: skip
        more = len(layout.region(coords).boxes) - len(boxes)
        held = " + ".join(f"[{box}]" for box in boxes) + (f" + {more} more" if more else "")
        table.add_row(str(rank), str(coords), str(layout.local_shape(coords)), held or "nothing")
    if len(layout.ranks) > _SPANS:
        table.caption = f"{len(layout.ranks) - _SPANS} more ranks not shown"
    return table

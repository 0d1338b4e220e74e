"""One color per set of ranks, the same in text, SVG and HTML."""

from __future__ import annotations

_COLORS = (
    "#8dd3c7", "#ffffb3", "#bebada", "#fb8072", "#80b1d3", "#fdb462",
    "#b3de69", "#fccde5", "#d9d9d9", "#bc80bd", "#ccebc5", "#ffed6f",
)  # fmt: skip


def color_of(ranks: tuple[int, ...]) -> str:
    """A color for a set of ranks: that of its first rank; white for nobody."""
    return _COLORS[min(ranks) % len(_COLORS)] if ranks else "#ffffff"

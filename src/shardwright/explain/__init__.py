"""Text and pictures of layouts, for people."""

from shardwright.explain.picture import Picture, visualize
from shardwright.explain.table import LayoutTable, layout_table

__all__ = ["LayoutTable", "Picture", "layout_table", "visualize"]

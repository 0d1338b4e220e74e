"""Text and pictures of layouts, for people."""

from shardwright.explain.op import Explanation, explain
from shardwright.explain.picture import Picture, visualize
from shardwright.explain.table import LayoutTable, layout_table

__all__ = ["Explanation", "LayoutTable", "Picture", "explain", "layout_table", "visualize"]

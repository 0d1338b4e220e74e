"""Text and pictures of layouts, of ops before they run, and of what a program communicated. For people."""

from shardwright.show.op import Explanation, explain
from shardwright.show.picture import Picture, visualize
from shardwright.show.table import LayoutTable, layout_table
from shardwright.show.trace import Trace, trace
from shardwright.show.trace_table import TraceRow, TraceTable

__all__ = [
    "Explanation",
    "LayoutTable",
    "Picture",
    "Trace",
    "TraceRow",
    "TraceTable",
    "explain",
    "layout_table",
    "trace",
    "visualize",
]

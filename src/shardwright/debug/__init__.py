"""Seeing what a program on distributed tensors communicated and decided."""

from shardwright.debug.trace import Trace, trace
from shardwright.debug.trace_table import TraceRow, TraceTable

__all__ = ["Trace", "TraceRow", "TraceTable", "trace"]

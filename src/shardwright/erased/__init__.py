"""Erased replay: a function of DTensors, recorded once, runs as its local program on plain tensors."""

from shardwright.erased.function import Erased, erase
from shardwright.erased.report import Report

__all__ = ["Erased", "Report", "erase"]

"""Erased replay: a function of DTensors, recorded once, runs as its local program on plain tensors."""

from shardwright.erase.erased import Erased, erase
from shardwright.erase.report import Report

__all__ = ["Erased", "Report", "erase"]

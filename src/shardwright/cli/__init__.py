"""The command line: `shardwright train | plan | explain | doctor`."""

from shardwright.cli.app import main

__all__ = ["main"]

"""Checkpoints of other programs, and those that other programs read."""

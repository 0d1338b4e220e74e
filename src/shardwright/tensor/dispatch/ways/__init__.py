"""The ways to run a call: one file each, one row each in `table`."""

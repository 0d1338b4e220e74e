"""Ops over a cut dim: what each rank runs, and what it exchanges for it."""

"""Ops over a cut dim as other ops, where that sends less than a rule."""

"""Fused optimizer steps: elementwise over parameter, gradient and state; counters and rates are scalars."""

from __future__ import annotations

from shardwright.rules.rule import rule

for _name in ("adam", "adamw", "sgd", "adagrad"):
    rule(f"aten::_fused_{_name}_", "*... ->", elementwise=True)

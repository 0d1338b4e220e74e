"""Fourier transforms: linear, along whole dims."""

from __future__ import annotations

from shardwright.rules.rule import rule

for _name in ("_fft_r2c", "_fft_c2r", "_fft_c2c"):
    rule(f"aten::{_name}", "...[dim:_] -> ...[dim:_]", hom="self: sum->sum")

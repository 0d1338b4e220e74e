"""Random ops: where the values go. Which values they are is decided above."""

from __future__ import annotations

from shardwright.rules.rule import rule

rule("aten::native_dropout", "*... -> ..., ...", elementwise=True)
rule("aten::rrelu_with_noise", "*... -> ...", elementwise=True)

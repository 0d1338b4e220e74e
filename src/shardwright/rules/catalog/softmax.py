"""Softmax and its kin: the normalised dim must be whole."""

from __future__ import annotations

from shardwright.rules.rule import rule

for _name in ("_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax"):
    rule(f"aten::{_name}", "...[dim:d!] -> ...[dim:d!]")
for _name in ("_softmax_backward_data", "_log_softmax_backward_data"):
    # The gradient of log_softmax subtracts output-weighted sums: linear in the gradient, not in the output.
    rule(f"aten::{_name}", "...[dim:d!], ...[dim:d!] -> ...[dim:d!]", hom="grad_output: sum->sum")
rule("aten::glu", "...[dim:_] -> ...[dim:_]")
rule("aten::glu_backward", "...[dim:_], ...[dim:_] -> ...[dim:_]", hom="grad_output: sum->sum")

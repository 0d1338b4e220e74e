"""Orderings along a dim: it must be whole."""

from __future__ import annotations

from shardwright.rules.rule import rule

rule("aten::sort", "...[dim:d!] -> ...[dim:d!], ...[dim:d!]")
rule("aten::topk", "...[dim:_] -> ...[dim:k!], ...[dim:k!]")

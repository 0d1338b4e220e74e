"""Rules: for one op and one mesh axis, which placements of the operands give which of the results.

Pure: no process group, no data. The notation and its facts are in `notation` and `formula`, the shipped rules
in `catalog`, the choice among them in `propagate`.
"""

from shardwright.rules import catalog
from shardwright.rules.algorithms.algorithm import Algorithm, register_algorithm
from shardwright.rules.call import Call, TensorInfo
from shardwright.rules.decision import Decision
from shardwright.rules.formula import Formula, formula
from shardwright.rules.identity import identity_of
from shardwright.rules.propagate import propagate
from shardwright.rules.registry import Rule, compare_with_schemas
from shardwright.rules.rule import register_rule, remove_rule, rule, rules_of

__all__ = [
    "Algorithm",
    "Call",
    "Decision",
    "Formula",
    "Rule",
    "TensorInfo",
    "catalog",
    "formula",
    "identity_of",
    "propagate",
    "register_algorithm",
    "register_rule",
    "remove_rule",
    "rule",
    "rules_of",
]

compare_with_schemas()

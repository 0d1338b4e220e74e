"""How rules are written and looked at: `rule`, `register_rule`, `rules_of`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import torch

from shardwright.errors import RuleError, refuse_other_kind
from shardwright.rules.call import Call
from shardwright.rules.formula import Facts, Formula, formula
from shardwright.rules.notation import parse
from shardwright.rules.registry import OpName, Rule, op_key, registry
from shardwright.rules.stated import check_formula, fits_op, overloads_of

When = Callable[[Call], bool]
Make = Callable[[Call], "Formula | str | None"]


def rule(
    op: OpName, text: str, *, when: When | None = None, later: bool = False, **facts: Unpack[Facts]
) -> Rule:
    """State the equation of an op in label notation; it serves every placement at once.

    `rule("aten::mm", "m k, k n -> m n", reduce="sum", hom=("self: sum->sum", "mat2: sum->sum"))`.

    Args:
        op: `ns::name` (or `torch.ops.ns.name`) for all overloads, `ns::name.overload` for one.
        text: the notation; an integer in a group is an uncut outer factor (`"b s (2 h) -> b s h"`).
        reduce: the reduction over labels that a result lacks (sum, max, min, product, any, all).
        hom: pending values that the op keeps pending, as `"arg + arg: sum->sum"`.
        ints: schema arguments that are the size of a label.
        shapes: schema arguments that are a shape, with its labels (`@0`: those of result 0).
        strides: schema arguments that are the strides of result 0.
        depends: for a result, by index, the arguments on which alone it depends.
        elementwise: any partition of the elements will do.
        prefix: labels whose sizes may disagree; they are then whole.
        even: labels that may only be cut evenly.
        local: a rank's call where one of the labels `held` is cut: `local(op, held, *args, **kwargs)`, with
            `held[label]` the indices that the rank holds (`rules.held.Held`), in any order and number.
        held: the labels along which positions matter to the op.
        when: whether the rule holds for a call.
        later: the op belongs to a library that is not imported yet: the rule is compared with it when the op
            is first met, in place of now.

    Returns: the rule, for `rules_of` and `remove_rule`.
    Raises: RuleError: the text is not in the notation, torch knows no such op, or the rule speaks of what the
        op has not: arguments, labels, numbers of tensors. Nothing is registered then.
    """
    _check_flags(later=later)
    kinds: Any = (Callable, type(None))
    refuse_other_kind(
        "rule: when", when, kinds, RuleError, fix="a function of the call that says True or False"
    )
    stated = formula(text, **facts)
    parse(text)
    key = op_key(op)
    if registry.open and not later:
        check_formula(key, stated, overloads_of(key))
    entry = Rule(key, _Stated(stated, when, key if later else None), str(stated), any_size=when is None)
    registry.add(entry)
    return entry


class _Stated:
    """A formula that is the same for every call, or for those that a condition admits.

    unseen: the key of an op that was not known when this was stated.
    """

    __slots__ = ("stated", "unseen", "when")

    def __init__(self, stated: Formula, when: When | None, unseen: str | None) -> None:
        self.stated = stated
        self.when = when
        self.unseen = unseen

    def __call__(self, call: Call) -> Formula | None:
        # An op may be served by the rule of another: an in-place form by that of the plain one.
        if self.unseen is not None and call.op._schema.name == self.unseen.partition(".")[0]:
            fits_op(self.unseen, self.stated, call.op)
        return self.stated if self.when is None or self.when(call) else None


def register_rule(*ops: OpName, any_size: bool = False, later: bool = False) -> Callable[[Make], Make]:
    """Register a function of the call that returns a formula (`formula(...)` or its text), or None.

    For ops whose arguments decide the labels: permute, view, index.

    Args:
        ops: the ops that it serves.
        any_size: it looks at the arguments, at dtypes and at how many dims there are, never at the size of a
            dim (but whether it is 0, 1 or more): then what is decided for one shape serves the others.
        later: the ops belong to a library that is not imported yet.
    Raises: RuleError: no op is named, or one that torch does not know.
    """
    if not ops:
        raise RuleError("register_rule: name at least one op")
    _check_flags(any_size=any_size, later=later)
    if registry.open and not later:
        for op in ops:
            overloads_of(op_key(op))

    def register(make: Make) -> Make:
        fix = "a function of the call that returns a formula, its text or None"
        refuse_other_kind("register_rule(...): make", make, Callable, RuleError, fix=fix)
        name = getattr(make, "__name__", type(make).__name__)
        for op in ops:
            registry.add(Rule(op_key(op), make, f"{name}(call)", any_size))
        return make

    return register


def _check_flags(**flags: object) -> None:
    for name, value in flags.items():
        refuse_other_kind(name, value, bool, RuleError, fix="True or False")


def remove_rule(entry: Rule) -> None:
    """Take a rule out of the registry again. Raises: RuleError: it is not there."""
    registry.remove(entry)


def rules_of(op: OpName) -> tuple[Rule, ...]:
    """The rules that serve an op, for people: each prints as its equation and facts."""
    if isinstance(op, torch._ops.OpOverload):
        return registry.rules_of(op)
    key = op_key(op)
    return tuple(entry for entry in registry if entry.op == key or entry.op.startswith(f"{key}."))

"""Wrong rules, planted by mutation: the checker must catch every one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shardwright.rules import Formula, formula, register_rule, registry, rule
from shardwright.rules.rule import remove_rule
from shardwright.testing.check_rule import check_rule
from shardwright.testing.simulate import RuleCheckError
from tests.rules.planted import TRUE, is_caught, mutants, mutants_of
from tests.rules.samples import aten, randn, samples_of


@pytest.mark.parametrize("op", TRUE, ids=lambda op: op.name())
def test_the_true_rule_passes(op: torch._ops.OpOverload) -> None:
    true = TRUE[op][0]
    assert check_rule(op, samples_of(op)[:1] + samples_of(op)[-1:], formula=true, worlds=(2,)).cut > 0


def test_there_are_enough_mutants() -> None:
    assert len(mutants()) >= 200


@pytest.mark.parametrize("op", TRUE, ids=lambda op: op.name())
def test_a_wrong_rule_is_caught(op: torch._ops.OpOverload) -> None:
    assert [str(mutant) for mutant in mutants_of(op) if not is_caught(op, mutant)] == []


@pytest.mark.parametrize("length", range(5, 9))
@pytest.mark.parametrize("fact", ["sum", "avg", "max", "min", "norm2"])
def test_a_false_fact_is_caught(fact: str, length: int) -> None:
    """Parts are any that combine to the value: the length of squares is not the square of their length."""
    with pytest.raises(RuleCheckError):
        _checked(torch.square, randn(length), formula("... -> ...", hom=(f"x: {fact}->{fact}",)))


@pytest.mark.parametrize(("fact", "function"), [("product", torch.square), ("norm2", lambda x: 2 * x)])
def test_a_true_fact_passes(fact: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert _checked(function, randn(7), formula("... -> ...", hom=(f"x: {fact}->{fact}",)))


def _checked(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, stated: Formula) -> bool:
    """Check a formula for an op of one operand that is defined for this."""
    library = torch.library.Library("rulefacts", "DEF")
    try:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", function, "CompositeExplicitAutograd")
        return check_rule("rulefacts::op", [(x,)], formula=stated, worlds=(3,)).cut > 0
    finally:
        library._destroy()


def test_a_rule_that_takes_interleaved_for_plain_is_caught() -> None:
    """A fused `(2 h)` is not `(h 2)`: cutting it in chunks mixes the halves."""
    op = aten.split.Tensor
    mixed = formula("a (h 2) -> a h, a h", ints={"split_size": "h"})
    with pytest.raises(RuleCheckError):
        check_rule(op, [(randn(3, 8), 4, 1)], formula=mixed)


def test_a_rule_that_forgets_the_local_size_is_caught() -> None:
    op = aten.view.default
    with pytest.raises(RuleCheckError, match=r"local call fails|promises"):
        check_rule(op, [(randn(4, 6), [24])], formula=formula("a b -> (a b)"))


def test_samples_that_cut_nothing_are_refused() -> None:
    with pytest.raises(RuleCheckError, match="nothing was tested"):
        check_rule(aten.exp.default, [(randn(4, 3),)], formula=formula("_ _ -> _ _"), worlds=(1, 2))


def test_a_rule_of_a_users_op_is_checked_by_name() -> None:
    """`(2 h)` takes Interleaved(2, 2) to Shard(2)."""
    library = torch.library.Library("rulecheck", "DEF")
    library.define("swiglu(Tensor x) -> Tensor")
    library.impl("swiglu", _swiglu, "CompositeExplicitAutograd")
    entry = rule("rulecheck::swiglu", "b s (2 h) -> b s h")
    try:
        assert check_rule("rulecheck::swiglu", [(randn(3, 5, 14),), (randn(4, 4, 8),)]).cut > 0
        with pytest.raises(RuleCheckError, match="result 0 differs"):
            check_rule("rulecheck::swiglu", [(randn(4, 4, 8),)], formula=formula("b s (h 2) -> b s h"))
    finally:
        remove_rule(entry)
        library._destroy()


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def test_a_registered_function_may_say_nothing() -> None:
    @register_rule("aten::channel_shuffle")
    def shuffled(call):
        return "n _ _ -> n _ _" if call.arg("groups") == 2 else None

    entry = next(r for r in registry.registry if r.make is shuffled)
    try:
        assert check_rule("aten::channel_shuffle", [(randn(5, 4, 3), 2)]).cut > 0
        assert check_rule("aten::channel_shuffle", [(randn(5, 4, 3), 4)]).without_formula == 1
    finally:
        remove_rule(entry)

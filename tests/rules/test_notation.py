"""The notation: what parses, what does not, and how patterns meet tensors."""

from __future__ import annotations

import pytest
import torch

from shardwright.errors import RuleError
from shardwright.rules.binding import bind
from shardwright.rules.described import BindingError
from shardwright.rules.formula import formula, parse_hom
from shardwright.rules.notation import Fixed, Group, Label, parse
from tests.rules.calls import aten, call, meta


def test_a_rule_is_read_operand_by_operand() -> None:
    notation = parse("b s! (2 h), *~... -> b _ h, ()")
    first, rest = notation.operands
    assert first.items == (Label("b"), Label("s", whole=True), Group((Fixed(2), Label("h"))))
    assert rest.star
    assert rest.metadata
    assert notation.results[0].items[1] == Label("_", whole=True)
    assert notation.results[1].items == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("m k, k n", "expected 'operands -> results'"),
        ("m k, , k n -> m n", "an operand is empty"),
        ("*m k, k n -> m n", "must be the last one"),
        ("m {k} -> m", "cannot read '{k}'"),
        ("... m ... -> m", "more than one '...'"),
        ("...[dim] -> m", "expected ':'"),
        ("(m k -> m", "found the end of the operand"),
        ("m ! -> m!!", "expected a label"),
    ],
)
def test_what_is_not_in_the_notation_is_refused_with_the_place(text: str, says: str) -> None:
    with pytest.raises(RuleError, match=says.replace("(", r"\(").replace(".", r"\.").replace("{", r"\{")):
        parse(text)


def test_what_keeps_sums_keeps_averages() -> None:
    homs = parse_hom("self + other: sum")
    assert [f"{hom.source}->{hom.target}" for hom in homs] == ["sum->sum", "avg->avg"]
    with pytest.raises(RuleError, match="expected 'arg"):
        parse_hom("sum->sum")


def test_labels_take_their_sizes_from_the_tensors() -> None:
    equation = bind(formula("m k, k n -> m n"), call(aten.mm.default, meta(3, 5), meta(5, 7)))
    assert dict(zip(equation.labels, equation.sizes, strict=True)) == {"m": 3, "k": 5, "n": 7}


def test_a_label_of_two_sizes_is_an_error_not_a_guess() -> None:
    with pytest.raises(BindingError, match="label k is 5 on one tensor, 7 on another"):
        bind(formula("m k, n k -> m n"), call(aten.mm.default, meta(3, 5), meta(5, 7)))


def test_broadcast_dims_are_no_label_where_they_are_one() -> None:
    equation = bind(formula("*... -> ..."), call(aten.add.Tensor, meta(3, 1), meta(1, 4)))
    assert dict(zip(equation.labels, equation.sizes, strict=True)) == {".1": 3, ".0": 4}
    left, right = equation.operands
    assert [dim.factors[0].label for dim in left.dims] == [equation.labels.index(".1"), -1]
    assert [dim.factors[0].label for dim in right.dims] == [-1, equation.labels.index(".0")]


def test_the_unknown_factor_of_a_group_is_found() -> None:
    equation = bind(formula("a (g c) -> a g c"), call(aten.view.default, meta(3, 12), [3, 4, 3]))
    assert dict(zip(equation.labels, equation.sizes, strict=True)) == {"a": 3, "g": 4, "c": 3}
    with pytest.raises(BindingError, match="not a multiple of 5"):
        bind(formula("a (5 c) -> a _ _"), call(aten.view.default, meta(3, 12), [3, 4, 3]))
    with pytest.raises(BindingError, match="nothing tells the sizes of g and c"):
        bind(formula("a (g c) -> a _ _"), call(aten.view.default, meta(3, 12), [3, 4, 3]))


def test_an_absent_optional_operand_is_skipped() -> None:
    made = call(aten.native_layer_norm.default, meta(3, 5), [5], None, meta(5), 1e-5)
    equation = bind(formula("b e!, x!, e! -> b e!, b 1, b 1"), made)
    assert [slot.name for slot in equation.operands] == ["input", "bias"]


def test_a_pattern_that_does_not_fit_names_the_tensor() -> None:
    with pytest.raises(BindingError, match="self has 2 dims, its pattern 3"):
        bind(formula("a b c -> a"), call(aten.exp.default, meta(3, 5)))
    with pytest.raises(BindingError, match="describes 1 tensors, the call has more"):
        bind(formula("a b -> a b"), call(aten.add.Tensor, meta(3, 5), meta(3, 5)))
    with pytest.raises(BindingError, match="describes 2 tensors, the call has fewer"):
        bind(formula("a b, a b -> a b"), call(aten.exp.default, meta(3, 5)))


def test_named_dims_count_in_the_rank_of_the_operand() -> None:
    made = call(aten.sum.dim_IntList, meta(3, 5, 7), [-2], dtype=torch.float64)
    equation = bind(formula("... -> ...[dim:]", reduce="sum"), made)
    assert [equation.labels[dim.factors[0].label] for dim in equation.results[0].dims] == [".2", ".0"]

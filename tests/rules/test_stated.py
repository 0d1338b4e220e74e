"""A rule that speaks of what its op has not is refused when it is stated, with what comes closest."""

from __future__ import annotations

import pytest
import torch

import shardwright as sw
from shardwright.errors import RuleError
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import MeshShape
from shardwright.placement import Shard
from shardwright.rules import TensorInfo, propagate, register_algorithm
from shardwright.rules.call import Call
from shardwright.rules.registry import registry
from shardwright.rules.rule import register_rule, remove_rule
from shardwright.rules.stated import check_formula, overloads_of

REFUSED = {
    "no such op": (
        ("aten::softmaxx", "... -> ..."),
        r"aten::softmaxx is not an op .*did you mean .*aten::softmax",
    ),
    "no such overload": (
        ("aten::add.Tensr", "..., ... -> ..."),
        r"has the overloads .* \(did you mean aten::add.Tensor",
    ),
    "no such library": (
        ("atne::mm", "m k, k n -> m n"),
        r"no op of 'atne' yet \(did you mean aten::.*later=True",
    ),
    "an operand too many": (("aten::mm", "m k, k n, n -> m n"), r"describes 3 operands and 1 results"),
    "an operand too few": (("aten::mm", "m k -> m"), r"describes 1 operands and 1 results"),
    "a result too many": (("aten::mm", "m k, k n -> m n, m"), r"describes 2 operands and 2 results"),
    "no result": (("aten::mm", "m k, k n ->"), r"describes 2 operands and 0 results"),
    "a fact of no argument": (
        ("aten::mm", "m k, k n -> m n", {"hom": ("self: sum->sum", "mat3: sum->sum")}),
        r"hom speaks of 'mat3', but the op has no tensor argument of that name \(did you mean mat2\?\)",
    ),
    "a fact of a number": (
        ("aten::add", "..., ... -> ...", {"hom": ("alpha: sum->sum",)}),
        r"hom speaks of 'alpha'",
    ),
    "an int of no argument": (
        ("aten::cumsum", "... d! -> ... d!", {"ints": {"dimm": "d"}}),
        r"ints speaks of 'dimm'.*did you mean dim\?",
    ),
    "a shape of no argument": (
        ("aten::sin", "d -> d", {"shapes": {"size": "d"}}),
        r"shapes speaks of 'size'",
    ),
    "strides of no argument": (
        ("aten::sin", "d -> d", {"strides": ("stride",)}),
        r"strides speaks of 'stride'",
    ),
    "depends on no argument": (("aten::sin", "d -> d", {"depends": {0: ("x",)}}), r"depends speaks of 'x'"),
    "a dim of no argument": (("aten::sin", "...[dim:d!] -> ...[dim:d!]"), r"\[...: \] speaks of 'dim'"),
    "an even label on no tensor": (
        ("aten::sin", "d -> d", {"even": ("e",)}),
        r"even speaks of the label 'e'",
    ),
    "a label that only the result has": (("aten::mm", "m k, k n -> m q"), r"'q' is on a result alone"),
    "a held label on no tensor": (("aten::sin", "d -> d", {"held": ("e",)}), r"held speaks of the label 'e'"),
    "a prefix label on no tensor": (
        ("aten::sin", "d -> d", {"prefix": ("e",)}),
        r"prefix speaks of the label 'e'",
    ),
}


@pytest.mark.parametrize("fault", list(REFUSED))
def test_what_the_op_has_not_is_refused(fault):
    (op, text, *facts), message = REFUSED[fault]
    before = list(registry)
    with pytest.raises(RuleError, match=message):
        sw.rule(op, text, **(facts[0] if facts else {}))
    assert list(registry) == before, "nothing is registered"


def test_functions_of_a_call_and_algorithms_name_ops_that_exist():
    with pytest.raises(RuleError, match="is not an op that torch knows"):
        register_rule("aten::no_such_op")(lambda call: None)
    with pytest.raises(RuleError, match="is not an op that torch knows"):
        register_algorithm("aten::no_such_op", cost=lambda call, layouts: 0)(lambda op, x: x)


def stated_in_the_catalog():
    return [entry for entry in registry if hasattr(entry.make, "stated") and entry.op.startswith("aten::")]


@pytest.mark.parametrize("entry", stated_in_the_catalog(), ids=lambda entry: entry.op)
def test_what_the_catalog_states_speaks_of_its_ops(entry):
    check_formula(entry.op, entry.make.stated, overloads_of(entry.op))


def test_a_rule_for_a_library_that_is_not_imported_yet_is_looked_at_when_its_op_is_met():
    right = sw.rule("statedlater::twice", "... -> ...", hom="x: sum->sum", later=True)
    wrong = sw.rule("statedlater::thrice", "... -> ...", hom="y: sum->sum", later=True)
    library = torch.library.Library("statedlater", "DEF")
    try:
        for name in ("twice", "thrice"):
            library.define(f"{name}(Tensor x) -> Tensor")
        layout = Layout(MeshShape(("tp",), (2,)), [Shard(0)], (4,), dtype=torch.float32)
        info = TensorInfo((4,), (1,), torch.float32)
        call = Call(torch.ops.statedlater.twice.default, (info,), (), (info,))
        assert propagate(call, [layout]).outputs[0].placements == (Shard(0),)
        with pytest.raises(RuleError, match=r"hom speaks of 'y'"):
            propagate(Call(torch.ops.statedlater.thrice.default, (info,), (), (info,)), [layout])
    finally:
        remove_rule(right)
        remove_rule(wrong)
        library._destroy()


WRITTEN_WRONG = [
    ({"foo": 3}, r"rule 'm n -> m n': no fact is called 'foo'; facts are reduce, hom"),
    ({"hom": 3}, r"rule 'm n -> m n': its facts {'hom': 3}"),
    ({"ints": 3}, r"rule 'm n -> m n': its facts"),
    ({"reduce": 3}, r"m n -> m n|reduction|3"),
    ({"depends": ["x"]}, r"rule 'm n -> m n': its facts"),
]


@pytest.mark.parametrize(("facts", "message"), WRITTEN_WRONG, ids=lambda value: str(value)[:20])
def test_facts_that_are_none_are_refused(facts, message):
    before = len(list(registry))
    with pytest.raises(RuleError, match=message):
        sw.rule("aten::mm", "m n -> m n", **facts)
    with pytest.raises(RuleError, match="expected the text of an equation"):
        sw.rule("aten::mm", 42)
    assert len(list(registry)) == before


@pytest.mark.parametrize("made", [42, ("m n -> m n",), object()], ids=lambda made: type(made).__name__)
def test_a_function_that_returns_no_formula_is_named(made):
    library = torch.library.Library("statedwrong", "DEF")
    library.define("once(Tensor x) -> Tensor")

    def of_call(call):
        return made

    register_rule("statedwrong::once")(of_call)
    info = TensorInfo((4,), (1,), torch.float32)
    layout = Layout(MeshShape(("tp",), (2,)), [Shard(0)], (4,), dtype=torch.float32)
    try:
        call = Call(torch.ops.statedwrong.once.default, (info,), (), (info,))
        with pytest.raises(
            RuleError, match=r"rule statedwrong::once: of_call\(call\): its function returned"
        ):
            propagate(call, [layout])
    finally:
        for entry in sw.rules_of("statedwrong::once"):
            remove_rule(entry)
        library._destroy()

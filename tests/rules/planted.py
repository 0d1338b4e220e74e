"""Wrong rules made from true ones by mutation: labels swapped, cut open, reduced otherwise, false facts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations

import torch

from shardwright.errors import RuleError
from shardwright.rules import Formula, formula
from shardwright.rules.binding import bind
from shardwright.rules.call import Call
from shardwright.testing.check_rule import check_rule
from shardwright.testing.rule_cases import Scattered, cases
from shardwright.testing.simulate import RuleCheckError, Sample, in_double, run_whole
from tests.rules.samples import aten, samples_of

# True rules, written out with one label per dim, and facts that are false for them.
TRUE: dict[torch._ops.OpOverload, tuple[Formula, tuple[str, ...]]] = {
    aten.mm.default: (
        formula("m k, k n -> m n", reduce="sum", hom=("self: sum", "mat2: sum")),
        ("self+mat2: sum", "self: max", "mat2: min"),
    ),
    aten.bmm.default: (formula("b m k, b k n -> b m n", reduce="sum"), ("self+mat2: sum", "self: max")),
    aten.addmm.default: (
        formula("n, m k, k n -> m n", reduce="sum", hom=("self+mat1: sum",)),
        ("self+mat1+mat2: sum", "mat1: sum", "self: sum"),
    ),
    aten.baddbmm.default: (
        formula("b m n, b m k, b k n -> b m n", reduce="sum", hom=("self+batch1: sum",)),
        ("self+batch1+batch2: sum", "batch1: sum"),
    ),
    aten.mv.default: (formula("m k, k -> m", reduce="sum"), ("self+vec: sum", "self: max")),
    aten.exp.default: (formula("a b -> a b"), ("self: sum", "self: max->min", "self: avg", "self: product")),
    aten.relu.default: (formula("a b -> a b"), ("self: sum", "self: max->min")),
    aten.clamp.default: (formula("a b -> a b"), ("self: sum", "self: avg")),
    aten.transpose.int: (formula("a b c -> c b a"), ("self: sum->max", "self: max->min")),
    aten.permute.default: (formula("a b c -> c a b"), ()),
    aten._softmax.default: (formula("a d! -> a d!"), ("self: sum", "self: max")),
    aten._log_softmax.default: (formula("d! b -> d! b"), ("self: sum", "self: max")),
    aten._log_softmax_backward_data.default: (
        formula("a d!, a d! -> a d!", hom="grad_output: sum"),
        ("output: sum", "grad_output+output: sum"),
    ),
    aten.native_layer_norm.default: (
        formula("a b e!, e!, e! -> a b e!, a b 1, a b 1"),
        ("input: sum", "weight: sum", "bias: sum"),
    ),
    aten.native_layer_norm_backward.default: (
        formula(
            "a b e!, a b e!, a b 1, a b 1, e!, e! -> a b e!, e!, e!",
            reduce=(None, "sum", "sum"),
            hom="grad_out: sum",
        ),
        ("input: sum", "weight: sum"),
    ),
    aten.embedding.default: (formula("v! e, a b -> a b e"), ("weight: sum->max",)),
    aten.embedding_dense_backward.default: (
        formula("a b e, a b -> v! e", reduce="sum", ints={"num_weights": "v"}),
        ("grad_output: max",),
    ),
    aten.index_select.default: (formula("a v!, i -> a i"), ()),
    aten.sort.default: (formula("a d! -> a d!, a d!"), ("self: sum", "self: max", "self: min")),
    aten.cumsum.default: (formula("a d! -> a d!"), ("self: max", "self: min")),
    # Attention is not among them: its CPU kernels crash on shapes that do not fit.
    aten.where.self: (
        formula("*... -> ...", hom="self+other: sum"),
        ("condition: any", "self: sum", "condition+self: max"),
    ),
    aten.div.Tensor: (formula("*... -> ...", hom="self: sum"), ("other: sum", "self+other: sum")),
    aten.mul.Tensor: (formula("*... -> ...", hom="self: sum"), ("self+other: sum", "self: max")),
    aten.add.Tensor: (formula("*... -> ...", hom="self+other: sum"), ("self: sum", "self+other: max")),
    aten.amax.default: (formula("d b -> b", reduce="max"), ("self: sum", "self: min")),
    aten.sum.dim_IntList: (formula("...[dim:d] -> ...[dim:]", reduce="sum"), ("self: max", "self: product")),
    aten.any.dim: (formula("a d -> a", reduce="any"), ("self: all",)),
    aten.prod.dim_int: (formula("d b -> b", reduce="product"), ("self: sum",)),
    aten.silu_backward.default: (formula("a b, a b -> a b", hom="grad_output: sum"), ("self: sum",)),
    aten.scatter_add.default: (
        formula("a d!, a j, a j -> a d!", reduce="sum", hom="self+src: sum"),
        ("src: sum", "self: sum"),
    ),
    aten.tril.default: (formula("a r! c! -> a r! c!"), ()),
}
_LABEL = re.compile(r"[A-Za-z][A-Za-z0-9]*")


@cache
def mutants_of(op: torch._ops.OpOverload) -> list[Formula]:
    """Wrong formulas for an op; one that allows nothing new is weaker than the rule, not wrong."""
    true, false_facts = TRUE[op]
    every = (
        *_swapped(true),
        *(replace(true, text=text) for text in _cut_open(true.text)),
        *_reduced_otherwise(true),
        *(replace(true, hom=(fact,)) for fact in false_facts),
    )
    return [mutant for mutant in every if not _claims(op, mutant) <= _true_claims(op)]


def mutants() -> list[tuple[torch._ops.OpOverload, Formula]]:
    """Those of all ops."""
    return [(op, mutant) for op in TRUE for mutant in mutants_of(op)]


def _swapped(true: Formula) -> Iterator[Formula]:
    """Two labels change places on one tensor."""
    left, right = true.text.split("->")
    tensors = [*left.split(","), *right.split(",")]
    count = len(left.split(","))
    for at, tensor in enumerate(tensors):
        for one, two in combinations(dict.fromkeys(_LABEL.findall(tensor)), 2):
            other = {one: two, two: one}
            changed = _LABEL.sub(lambda m, other=other: other.get(m.group(), m.group()), tensor)
            new = [*tensors[:at], changed, *tensors[at + 1 :]]
            yield replace(true, text=f"{','.join(new[:count])}->{','.join(new[count:])}")


def _cut_open(text: str) -> Iterator[str]:
    """A label that must be whole may suddenly be cut."""
    for label in dict.fromkeys(re.findall(r"([A-Za-z][A-Za-z0-9]*)!", text)):
        yield re.sub(rf"\b{label}!", label, text)


def _reduced_otherwise(true: Formula) -> Iterator[Formula]:
    """A sum taken for something else."""
    if true.reduce is None:
        return
    for wrong in ("max", "min", "avg", "product"):
        changed = wrong if isinstance(true.reduce, str) else tuple(r and wrong for r in true.reduce)
        yield replace(true, reduce=changed)


def is_caught(op: torch._ops.OpOverload, mutant: Formula) -> bool:
    """Does the checker refuse it?"""
    try:
        check_rule(op, samples_of(op), formula=mutant, worlds=(2, 3))
    except RuleCheckError:
        return True
    return False


@cache
def _calls(op: torch._ops.OpOverload) -> list[Call]:
    """The samples of an op as what a rule looks at."""
    samples = [sample if isinstance(sample, Sample) else Sample(sample) for sample in samples_of(op)]
    return [run_whole(op, in_double(sample)).call for sample in samples]


@cache
def _true_claims(op: torch._ops.OpOverload) -> set[object]:
    return _claims(op, TRUE[op][0])


def _claims(op: torch._ops.OpOverload, stated: Formula) -> set[object]:
    """What a formula says may be done on two ranks, for the samples of the op."""
    found: set[object] = set()
    for call in _calls(op):
        try:
            equation = bind(stated, call)
        except RuleError:
            return {"does not fit"}
        every = cases(equation, call, 2, torch.Generator().manual_seed(0))
        named = [candidate for candidate in every if not isinstance(candidate.part, Scattered)]
        found |= {(call, candidate.inputs, candidate.outputs) for candidate in named}
    return found

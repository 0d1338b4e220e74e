"""Every algebraic fact in every form of its op, on real ranks beside one device.

A fact says what a rule does with a pending value. It is stated once per op and used by its method, in place,
with `out=`, in lists and through views; each of these decides and writes on a way of its own.
"""

from __future__ import annotations

import importlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import shardwright as sw
from shardwright.errors import ShardwrightError
from shardwright.placement.base import Pending
from shardwright.rules import registry, rules_of
from shardwright.rules.binding import bind
from shardwright.rules.described import BindingError
from shardwright.rules.equation import BoundHom
from shardwright.rules.monoid import KEPT, pending_of
from shardwright.rules.op import functional_form, out_names
from shardwright.testing.meshes import rank_mesh
from shardwright.testing.rule_cases import random_parts, speaks_of
from shardwright.testing.simulate import Sample, in_double, run_whole

Overload = torch._ops.OpOverload
_ANY = ("sum", "max", "min", "avg", "product")
_REFUSALS = (RuntimeError, TypeError, ValueError, AttributeError, IndexError)


@dataclass
class Tried:
    """How often each form was compared with one device, and the counterexamples."""

    forms: Counter[str] = field(default_factory=Counter)
    facts: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)

    def __iadd__(self, other: Tried) -> Self:
        self.forms += other.forms
        self.facts |= other.facts
        self.wrong += other.wrong
        return self

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {count:,}" for name, count in self.forms.most_common())
        return f"{len(self.facts)} facts in {sum(self.forms.values()):,} calls by form: {counts}"


# ------------------------------------------------------------------------------------------- the forms

Put = Callable[[Tensor], Tensor]
# What a form returns and what it writes, for plain tensors and for distributed ones alike.
Form = Callable[[Overload, list[Any], dict[str, Any], Put], "tuple[list[Any], list[Tensor]]"]


def _plain(op: Overload, args: list[Any], kwargs: dict[str, Any], _: Put) -> Any:
    return tree_leaves(op(*args, **kwargs)), []


def _method(op: Overload, args: list[Any], kwargs: dict[str, Any], _: Put) -> Any:
    return tree_leaves(getattr(args[0], _name(op))(*args[1:], **kwargs)), []


def _in_place(op: Overload, args: list[Any], kwargs: dict[str, Any], _: Put) -> Any:
    return tree_leaves(_form(op, "_")(*args, **kwargs)), [args[0]]


def _through_a_view(op: Overload, args: list[Any], kwargs: dict[str, Any], _: Put) -> Any:
    base = torch.stack([args[0], args[0]])
    version = base._version
    _form(op, "_")(base[1], *args[1:], **kwargs)
    return [base, base._version - version], []


def _with_out(op: Overload, args: list[Any], kwargs: dict[str, Any], put: Put) -> Any:
    found = _form(op, "")
    metas, named_metas = tree_map_only(Tensor, _meta, (args, kwargs))
    outs = [put(torch.zeros(x.shape, dtype=x.dtype)) for x in tree_leaves(op(*metas, **named_metas))]
    named = dict(zip(out_names(found), outs, strict=True))
    return tree_leaves(found(*args, **kwargs, **named)), outs


def _list(op: Overload, args: list[Any], kwargs: dict[str, Any], put: Put) -> Any:
    """A second position holds other layouts: what the first one needs must not be done to it."""
    return tree_leaves(_list_op(op, "")(*_lists(args, put), **kwargs)), []


def _list_in_place(op: Overload, args: list[Any], kwargs: dict[str, Any], put: Put) -> Any:
    lists = _lists(args, put)
    _list_op(op, "_")(*lists, **kwargs)
    return [], lists[0]


def _lists(args: list[Any], put: Put) -> list[Any]:
    return [[x, put(_whole(x))] if isinstance(x, Tensor) else x for x in args]


FORMS: dict[str, Form] = {
    "plain": _plain,
    "method": _method,
    "in place": _in_place,
    "out=": _with_out,
    "out= of terms": _with_out,
    "list": _list,
    "list in place": _list_in_place,
    "through a view": _through_a_view,
}


def _name(op: Overload) -> str:
    return op._schema.name.partition("::")[2]


def _form(op: Overload, mark: str) -> Overload:
    """The overload that writes what `op` returns: in place (`_`) or into `out`."""
    packet = getattr(torch.ops.aten, _name(op) + mark)
    for name in packet.overloads():
        found = getattr(packet, name)
        if found is not op and functional_form(found) is op:
            return found
    raise NotImplementedError


def _list_op(op: Overload, mark: str) -> Any:
    return getattr(torch.ops.aten, f"_foreach_{_name(op)}{mark}")


def _meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, sw.DTensor) else x.clone()


# ---------------------------------------------------------------------------------------- the comparison


def has_facts(op: Overload) -> bool:
    """Whether the op is in a form that writes nothing and its rules may know of pending values."""
    known = bool(rules_of(op)) and not op._schema.is_mutable
    return known and "empty" not in _name(op) and _name(op) != "_foreach_norm"


def op_named(name: str) -> Overload:
    """The overload that `op.name()` names; some are made when their module is imported."""
    importlib.import_module("torch.nn.modules.linear_cross_entropy")
    home, _, form = name.partition("::")
    packet, _, overload = form.partition(".")
    return getattr(getattr(getattr(torch.ops, home), packet), overload or "default")


def smallest(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Samples with few elements show as much, and both ranks have to make, send and compare them."""

    def elements(sample: Sample) -> int:
        return sum(x.numel() for x in tree_leaves((sample.args, sample.kwargs)) if isinstance(x, Tensor))

    return sorted((s for s in samples if 0 < elements(s) <= _MOST), key=elements, reverse=True)[:count]


_MOST = 400


def check_forms(calls: Sequence[tuple[str, Sample]], forms: Sequence[str] = tuple(FORMS)) -> Tried:
    """Runs on every rank of a world: each fact of these calls, in each of the forms that its op has."""
    tried = Tried()
    warnings.simplefilter("ignore")
    for name, sample in calls:
        op = op_named(name)
        for kind in _kinds(sample):
            try:
                facts = list(_facts(op, kind))
            except _REFUSALS:
                continue
            for hom, source in facts:
                tried.facts.add(f"{op.name()}: {'+'.join(hom.fact.args)}: {source.reduce_op}")
                for form in forms:
                    _check(op, kind, hom, source, form, tried)
    return tried


def _kinds(sample: Sample) -> Iterator[Sample]:
    """In double, and integers in eight bits too: they wrap around."""
    yield in_double(sample)
    dtypes = {x.dtype for x in tree_leaves((sample.args, sample.kwargs)) if isinstance(x, Tensor)}
    if dtypes == {torch.int64}:
        small = tree_map_only(Tensor, lambda x: (x * 37).to(torch.uint8), (sample.args, sample.kwargs))
        yield Sample(*small)


def _facts(op: Overload, sample: Sample) -> Iterator[tuple[BoundHom, Pending]]:
    whole = run_whole(op, sample)
    call, tensors = whole.call, whole.tensors
    for formula in registry.registry.formulas(call):
        try:
            equation = bind(formula, call)
        except BindingError:
            continue
        for hom in equation.homs:
            for name in _ANY if hom.fact.source in KEPT else (hom.fact.source,):
                source = pending_of(name)
                read = [tensors[i] for i in sorted(hom.operands)]
                if all(speaks_of(source, x.dtype) and source.in_domain(x) for x in read):
                    yield hom, source


def _check(op: Overload, sample: Sample, hom: BoundHom, source: Pending, form: str, tried: Tried) -> None:
    run = FORMS[form]
    plain, named = tree_map_only(Tensor, torch.clone, (list(sample.args), dict(sample.kwargs)))
    try:
        expected, written = run(op, plain, named, torch.clone)
    except _REFUSALS:
        return  # one device has no such form, or not for these arguments
    tried.forms[form] += 1
    operands = iter(_placed(op, sample, hom, source))
    ours, ours_named = tree_map_only(
        Tensor, lambda _: next(operands), (list(sample.args), dict(sample.kwargs))
    )
    before = [x.placements for x in tree_leaves(ours) if isinstance(x, sw.DTensor)]
    try:
        put = partial(_terms, source=source) if form == "out= of terms" else _replicate
        found, changed = run(op, ours, ours_named, put)
        problem = _difference([*expected, *written], [*found, *changed])
        after = [x.placements for x in tree_leaves(ours) if isinstance(x, sw.DTensor)]
        problem = problem or ("" if before == after else f"placements {before} became {after}")
        versions = [x._version for x in written], [x._version for x in changed]
        problem = problem or ("" if versions[0] == versions[1] else f"versions {versions}")
    except (ShardwrightError, *_REFUSALS) as error:
        if form in {"in place", "through a view"} and _changes_shape(op, sample):
            return  # `addbmm_` alone changes the shape of what it writes: refused here, as others are
        problem = f"{type(error).__name__}: {error}"
    if problem:
        fact = f"{'+'.join(hom.fact.args)}: {source.reduce_op}"
        dtypes = {str(x.dtype) for x in tree_leaves(sample.args) if isinstance(x, Tensor)}
        tried.wrong.append(f"{op.name()} {form}, {fact}, {sorted(dtypes)}: {problem}")


def _changes_shape(op: Overload, sample: Sample) -> bool:
    return bool(op(*sample.args, **sample.kwargs).shape != sample.args[0].shape)


def _placed(op: Overload, sample: Sample, hom: BoundHom, source: Pending) -> Iterator[Tensor]:
    """The operands in the order of the arguments: random terms for those of the fact, the others whole."""
    generator = torch.Generator().manual_seed(0)
    tensors = [x for x in tree_leaves((sample.args, sample.kwargs)) if isinstance(x, Tensor)]
    for index, x in enumerate(tensors):
        if index in hom.operands:
            parts = random_parts(source, x.clone(), dist.get_world_size(), generator)
            mesh = rank_mesh((dist.get_world_size(),), ("tp",))
            yield sw.DTensor.from_local(parts[dist.get_rank()].clone(), mesh, [source])
        else:
            yield _replicate(x)


def _replicate(x: Tensor) -> Tensor:
    mesh = rank_mesh((dist.get_world_size(),), ("tp",))
    return sw.DTensor.from_local(x.clone(), mesh, [sw.Replicate()])


def _terms(x: Tensor, source: Pending) -> Tensor:
    """A tensor to be written that is as pending as what is read."""
    mesh = rank_mesh((dist.get_world_size(),), ("tp",))
    return sw.DTensor.from_local(x.clone(), mesh, [source])


def _difference(expected: list[Any], found: list[Any]) -> str:
    if len(expected) != len(found):
        return f"{len(found)} results instead of {len(expected)}"
    for one, other in zip(expected, found, strict=True):
        if not isinstance(one, Tensor):
            if one != other:
                return f"{other} instead of {one}"
            continue
        try:
            torch.testing.assert_close(_whole(other), one, rtol=1e-6, atol=1e-6, equal_nan=True)
        except AssertionError as error:
            return str(error).partition("\n\n")[0].replace("\n", " ") + f": {_whole(other)} instead of {one}"
    return ""

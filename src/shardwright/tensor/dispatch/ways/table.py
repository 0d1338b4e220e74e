"""The ways to run an op on DTensors, in order: the first that answers does it.

A way of an op answers for all its calls; a way of a call looks at the operands. A new way is a file beside
this one and a row here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shardwright.compat import tree_leaves
from shardwright.errors import RuleError
from shardwright.remember import forget
from shardwright.rules import registry
from shardwright.rules.algorithms.ops import FINISH, WITHIN
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.rules.catalog.view_maps import is_described
from shardwright.rules.op import functional_form, is_collective, list_arguments, out_names
from shardwright.tensor.dispatch.asked import Asked
from shardwright.tensor.dispatch.kernel_refusals import refuse_alike
from shardwright.tensor.dispatch.ways import steps, view
from shardwright.tensor.dispatch.ways.algorithm import by_algorithm, finish, within
from shardwright.tensor.dispatch.ways.fresh_results import fresh
from shardwright.tensor.dispatch.ways.gather import gathered
from shardwright.tensor.dispatch.ways.hand_collective import run_collective
from shardwright.tensor.dispatch.ways.host_value import READS
from shardwright.tensor.dispatch.ways.lists import run_on_lists
from shardwright.tensor.dispatch.ways.one_mesh import on_one_mesh
from shardwright.tensor.dispatch.ways.other_memory import SETS
from shardwright.tensor.dispatch.ways.resize import RESIZES
from shardwright.tensor.dispatch.ways.rule import by_rule
from shardwright.tensor.dispatch.ways.shape_change import reshape_of
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.random.full import draw_of
from shardwright.tensor.views.strided import STRIDED

Handler = Callable[[Op, tuple[Any, ...], Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Way:
    """One row.

    Args:
        name: for people.
        of_op: what runs every call of the op; None: another way does.
        of_call: how this call is run (something with `run`); None: another way does.
        only: of which ops it is asked, by what is known of an op alone; None: of all.
        by_other_ops: what it answers runs other ops, which may turn out not to take these arguments.
        of_symbols: `of_op`: it takes sizes that are symbols of a graph, which the ops that it runs tell.
    """

    name: str
    of_op: Callable[[Op], Handler | None] | None = None
    of_call: Callable[[Asked], Any] | None = None
    only: Callable[[Op], Any] | None = None
    by_other_ops: bool = False
    of_symbols: bool = False


def _rewritten(func: Op) -> Handler | None:
    rewrite = registry.rewrite_of(func)
    if rewrite is None:
        return None
    function = fresh(func, partial(rewrite, func))

    def rewritten(func: Op, args: Args, kwargs: Kwargs) -> Any:
        tensors = [x for x in tree_leaves((args, dict(kwargs))) if isinstance(x, DTensor)]
        refuse_alike(func, args, kwargs, tensors)
        return function(*args, **kwargs)

    return rewritten


def _changes_shape(func: Op) -> bool:
    return torch.Tag.inplace_view in func.tags


def _draws(func: Op) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _has_no_rule(func: Op) -> bool:
    return not registry.rules_of(func)


def _refuse_sparse(func: Op, _args: Args, _kwargs: Kwargs) -> Any:
    raise RuleError(
        f"{func.name()}: the parts of a DTensor are dense, sparse tensors have no placement\n"
        "  fix: compute on dense tensors (nn.Embedding(sparse=False)), or on x.to_local() and x.full_tensor()"
    )


_SPARSE = (
    "_sparse_compressed_tensor_unsafe", "_sparse_coo_tensor_with_dims", "_sparse_log_softmax",
    "_sparse_coo_tensor_with_dims_and_tensors", "_sparse_mm_reduce_impl", "_sparse_softmax", "_sparse_sum",
    "_to_sparse", "_to_sparse_bsc", "_to_sparse_bsr", "_to_sparse_csc", "_to_sparse_csr", "sparse_mask",
    "sparse_sampled_addmm",
)  # fmt: skip
_PACKETS = [getattr(torch.ops.aten, name) for name in _SPARSE]
_OF_SPARSE = {getattr(each, name): _refuse_sparse for each in _PACKETS for name in each.overloads()}


def _of_an_undefined_gradient(asked: Asked) -> Any:
    return steps.of_an_undefined_gradient(asked) if asked.args and asked.args[0] is None else None


def _on_one_mesh(asked: Asked) -> Any:
    return None if asked.on_one_mesh else on_one_mesh(asked)


WAYS: list[Way] = [
    Way("collective by hand", of_op=lambda _: run_collective, only=is_collective),
    Way("sparse tensors", of_op=_OF_SPARSE.get),
    Way("host value", of_op=READS.get),
    Way("resize", of_op=RESIZES.get),
    Way("other memory", of_op=SETS.get),
    Way("strided view", of_op=STRIDED.get),
    Way("finish", of_op={FINISH: finish}.get),
    Way("values within bounds", of_op={WITHIN: within}.get),
    Way("shape change", of_op=reshape_of, only=_changes_shape),
    Way("random numbers", of_op=draw_of, only=_draws),
    Way("lists", of_op=lambda _: partial(run_on_lists, decide), only=list_arguments),
    Way("rewriting", of_op=_rewritten, of_symbols=True),
    Way("undefined gradient", of_call=_of_an_undefined_gradient, by_other_ops=True),
    Way("one mesh", of_call=_on_one_mesh, by_other_ops=True),
    Way("decomposition", of_call=steps.decomposed, only=_has_no_rule, by_other_ops=True),
    Way("out= of another size", of_call=steps.into_another_size, only=out_names, by_other_ops=True),
    Way("view of a cut dim", of_call=view.of_a_cut_dim, only=is_described),
    Way("view", of_call=view.instead_of_a_move, only=is_described),
    Way("algorithm", of_call=by_algorithm),
    Way("functional form", of_call=steps.by_functional_form, only=functional_form, by_other_ops=True),
    Way("gather", of_call=gathered),
    Way("rule", of_call=by_rule),
]


def handler_of(func: Op) -> Handler | None:
    """What runs every call of an op; None where its calls are decided one by one."""
    for way in WAYS:
        if way.of_op is not None and (way.only is None or way.only(func)):
            found = way.of_op(func)
            if found is not None:
                return found
    return None


def takes_symbols(func: Op) -> bool:
    """Does what runs its calls take sizes that are symbols?"""
    ways = (way for way in WAYS if way.of_op is not None and (way.only is None or way.only(func)))
    first = next((way for way in ways if way.of_op is not None and way.of_op(func) is not None), None)
    return first is None or first.of_symbols


def decide(asked: Asked, *, by_other_ops: bool = True) -> Any:
    """How a call is run: something with `run`.

    Args: by_other_ops: False: only ways that run this very op.
    Raises: what one device raises for these shapes and dtypes, or RuleError.
    """
    refuse_alike(asked.func, asked.args, asked.kwargs, asked.tensors)
    for way in WAYS:
        if way.of_call is None or (way.by_other_ops and not by_other_ops):
            continue
        if way.only is None or way.only(asked.func):
            found = way.of_call(asked)
            if found is not None:
                return found
    raise RuleError(f"{asked.func.name()}: there is no way to run it on DTensors")


def add_way(way: Way, *, before: str) -> None:
    """Add a way before the one of this name; it takes effect at once. Raises: RuleError: there is no such."""
    WAYS.insert(_place(before), way)
    forget()


def remove_way(name: str) -> None:
    """Take a way out again. Raises: RuleError: there is no such."""
    del WAYS[_place(name)]
    forget()


def _place(name: str) -> int:
    names = [way.name for way in WAYS]
    if name not in names:
        raise RuleError(f"there is no way {name!r}; the ways are {', '.join(names)}")
    return names.index(name)

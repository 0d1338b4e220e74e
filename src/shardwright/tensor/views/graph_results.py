"""Results of a graph that are views, of arguments or of other results, as torch is told of them in a trace.

torch takes such a view anew once the graph has run and written what it writes, outside of what the graph
differentiates: so later writes through it reach the argument, and autograd sees them.

Rejected: pointing the local tensors of such results at the memory of the argument. Of a copied view that is
not enough, and no gradient sees a write. It is done for what is no view of the argument (`PartOf`) alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from shardwright.compat import DisableTorchFunctionSubclass, tree_leaves, tree_map_only
from shardwright.compat.graph_views import Watch, is_written, seen_again, share_storage, views_of
from shardwright.errors import RuleError
from shardwright.remember import remembered
from shardwright.rules.call import Op
from shardwright.tensor.autograd import apply
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.views import write_back
from shardwright.tensor.wrap import hold_outside, local_part, offset_of, wrap


@dataclass(frozen=True, slots=True)
class Step:
    """A view of what the step before gave. op: its name, since a graph may be kept in a file."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """The view, as autograd sees it."""
        out = _named(self.op)(base, *self.args, **self.kwargs)
        made: torch.Tensor = out if self.index is None else out[self.index]
        return made


@remembered(4096)
def _named(op: str) -> Op:
    namespace, _, name = op.partition("::")
    name, _, overload = name.partition(".")
    found: Op = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    return found


@dataclass(frozen=True, slots=True)
class ViewOf:
    """How a result is taken of an argument."""

    steps: tuple[Step, ...]
    sequence: tuple[()] = ()

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """The view of an argument with values."""
        with DisableTorchFunctionSubclass():
            for step in self.steps:
                base = step.of(base)
        return base


def _found(args: Sequence[Any], results: Sequence[Any]) -> dict[int, ViewOf | PartOf]:
    """Which results of a function that was traced are views, and of what.

    torch is to see that those of an argument share its storage, and those of what is returned beside them.
    Not where sizes are symbols, if nothing writes the argument: what the graph gives shares its memory. So it
    is for one of several views of one op, which autograd lets nobody write.
    """
    ours = {id(x): is_written(x) for x in args if type(x) is DTensor}
    together = Counter(id(_shown_base(x)) for x in results)
    found: dict[int, ViewOf | PartOf] = {}
    for place, x in enumerate(results):
        if not isinstance(x, torch.Tensor) or any(x is arg for arg in args):
            continue
        base, steps = _way_to(x, ours)
        of_numbers = None not in steps
        alone = of_numbers and all(step is None or step.index is None for step in steps)
        if ours.get(id(base)) or (alone and (id(base) in ours or (steps and together[id(base)] > 1))):
            share_storage(x, base)
            if of_numbers:
                found[place] = ViewOf(cast("tuple[Step, ...]", steps))
            continue
        part = _part_of(x, args)
        if part is not None:
            found[place] = part
    return found


def _shown_base(x: Any) -> Any:
    """The tensor of which autograd knows it as a view, or itself."""
    return x._base if isinstance(x, DTensor) and x._base is not None else x


def _way_to(x: torch.Tensor, ours: Container[int]) -> tuple[torch.Tensor, tuple[Step | None, ...]]:
    """The argument, or else the base in autograd's graph, of which it is a view, and the steps from there.

    None for a step that symbols decide.
    """
    steps: list[Step | None] = []
    shown = x._base if x._base is not None and x._base.requires_grad and x.requires_grad else None
    for made in write_back.way_to(x) if type(x) is DTensor else ():
        args, kwargs = tree_map_only(torch.SymInt, _number, (made.args, dict(made.kwargs)))
        symbols = any(isinstance(value, _UNKNOWN) for value in tree_leaves((args, kwargs)))
        steps.insert(0, None if symbols else Step(made.func.name(), args, kwargs, made.index))
        if id(made.base) in ours or made.base is shown:
            return made.base, tuple(steps)
    return x, ()


def _number(size: torch.SymInt) -> Any:
    return int(size) if size.node.expr.is_number else size


_UNKNOWN = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)


# ------------------------------------------------------------------------------------------- memory alone


@dataclass(frozen=True, slots=True)
class PartOf:
    """A result that has the memory of an argument in another way than as a view: its local part, say.

    argument: its place. views: how the local tensor of the one is seen in that of the other.
    """

    argument: int
    views: Any
    sequence: tuple[()] = ()

    def settle(self, result: torch.Tensor, argument: torch.Tensor) -> torch.Tensor:
        """Give a result that a graph made the memory of the argument."""
        memory = seen_again(local_part(argument).detach(), self.views)
        hold_outside("a graph")
        if result.requires_grad and torch.is_grad_enabled():
            seen: torch.Tensor = apply(_Seen, result, memory)
            return seen
        if isinstance(result, DTensor):
            result._local_tensor = memory
        else:
            result.data = memory
        return result


class _Seen(torch.autograd.Function):
    """The value in the memory of the argument. Autograd refuses what its gradient would not see.

    Nobody may write it, or read it once the argument was written.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        seen = wrap(memory, x._spec, offset=offset_of(x)) if isinstance(x, DTensor) else memory
        return seen.view_as(seen)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004
        return grad, None


def _part_of(x: torch.Tensor, args: Sequence[Any]) -> PartOf | None:
    """Raises: RuleError: symbols decide how it is seen."""
    memory = local_part(x).untyped_storage()._cdata
    for place, arg in enumerate(args):
        if not isinstance(arg, torch.Tensor) or local_part(arg).untyped_storage()._cdata != memory:
            continue
        written = is_written(arg)
        if not (isinstance(arg, DTensor) or isinstance(x, DTensor)) or not (written or x.requires_grad):
            return None
        same = [(y.shape, y.stride(), y.storage_offset()) for y in (local_part(x), local_part(arg))]
        views = [] if same[0] == same[1] else views_of(local_part(x))
        if views is None and written:
            raise RuleError(_OF_SYMBOLS)
        if views is None:
            return None
        return PartOf(place, views)
    return None


_OF_SYMBOLS = (
    "a graph of any size writes an argument, and returns what shares its memory and is no view of it\n"
    "  fix: return a clone(), or compile it with dynamic=False"
)


def _concerns(args: Sequence[Any]) -> bool:
    return any(isinstance(x, DTensor) for x in args)


WATCH = Watch(_concerns, write_back.all_views, _found)

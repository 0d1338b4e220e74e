"""The refusal of a rank's own term where it would weigh a DTensor's gradient as if all ranks had the same.

A plain tensor of one element counts as replicated. One whose graph reads parameters that each rank computes
with for itself (a loss over this rank's rows) is not: ranks have other values. Added to a DTensor it takes
nothing from that one's gradient; multiplied, the gradient is its value, another one on each rank.

What it was added to has another value on each rank too. Such a sum keeps the terms in it, and so does what is
made of it. Whether a function weighs by that value its graph tells: a gradient that depends on a value needs
it, so a node of the graph has saved it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import DisableTorchFunctionSubclass, axis_names, function_of, saved_hooks_on
from shardwright.compat.fully_shard.parameters import sharded_behind
from shardwright.errors import RuleError
from shardwright.rules.call import Args
from shardwright.tensor.autograd import Localize
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.plain.refuse import tensors_in
from shardwright.tensor.wrap import CLASSES

# Functions in which the gradient of one operand does not depend on the value of another.
_ADDING = frozenset(
    {"add", "add_", "__radd__", "__iadd__", "sub", "sub_", "__rsub__", "__isub__", "stack", "cat", "where"}
)


class Held(NamedTuple):
    """What is in a sum: terms that may be a rank's own, and whether a DTensor that wants a gradient."""

    terms: tuple[Tensor, ...]
    counts: bool


def refuse_terms(func: Any, args: Args, kwargs: dict[str, Any]) -> Held | None:
    """Raise RuleError for a rank's own term among the operands, unless it is only added.

    Returns: what may be such a term, and is in the result.
    Cost: a walk through the graph of a plain tensor of one element that wants a gradient, if that is not only
        added; nothing else.
    """
    given = list(tensors_in((*args, *kwargs.values())))
    terms = tuple(x for x in given if x.requires_grad and not isinstance(x, TorchDTensor))
    meshes = [x.device_mesh for x in given if isinstance(x, TorchDTensor) and x.requires_grad]
    if meshes and getattr(func, "__name__", "") not in _ADDING:
        _refuse_own(func, terms, meshes)
        return None
    return Held(terms, bool(meshes)) if terms else None


def _refuse_own(func: Any, terms: Iterable[Tensor], meshes: list[DeviceMesh]) -> None:
    for x in terms:
        axes = _own_axes(x, meshes)
        if axes:
            raise RuleError(_TERM.format(getattr(func, "__name__", ""), ", ".join(axes)))


class SumWithTerms(DTensor):
    """A DTensor whose value may be another one on each rank, for terms of a rank are in it.

    Its class is the mark, so that nothing is asked of any other DTensor.
    """

    __slots__: list[str] = []
    _held: Held

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Args = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if CLASSES[True] in types:  # a parameter that computes as its local tensor is asked first
            return NotImplemented
        if not torch.is_grad_enabled() or getattr(func, "__name__", "") in _OF_NO_VALUE:
            return super().__torch_function__(func, types, args, kwargs)
        given = [x for x in tensors_in((*args, *(kwargs or {}).values())) if isinstance(x, TorchDTensor)]
        with DisableTorchFunctionSubclass():
            before = {x.grad_fn for x in given}
        out = super().__torch_function__(func, types, args, kwargs)
        marked = [x for x in given if type(x) is cls]
        others = [x for x in given if type(x) is not cls]
        counting = [x for x in marked if x._held.counts] + [x for x in others if x.requires_grad]
        terms = tuple(term for x in marked for term in x._held.terms)
        if counting and _saves_more_than(others, out, before):
            _refuse_own(func, terms, [x.device_mesh for x in counting])
        return marked_as(out, Held(terms, bool(counting)))

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """As that of any other; what it gives holds the same terms."""
        moved: DTensor = marked_as(super().redistribute(*args, **kwargs), self._held)
        return moved


_OF_NO_VALUE = frozenset({"__get__", "__set__", "backward", "grad"})


def marked_as(out: Any, held: Held) -> Any:
    """Mark the DTensors that a function made of what is held."""
    for x in tensors_in((out,)):
        if type(x) is DTensor and x.requires_grad:
            x.__class__ = SumWithTerms
            cast("SumWithTerms", x)._held = held
        elif type(x) is SumWithTerms:
            x._held = Held((*x._held.terms, *held.terms), x._held.counts or held.counts)
    return out


def _saves_more_than(known: Sequence[Tensor], out: Any, before: set[Any]) -> bool:
    """Has a node of the graph from some nodes to `out` saved a DTensor that is none of the known?

    Saved by hooks of the program, nothing is asked: that could recompute it.
    """
    if saved_hooks_on():
        return False
    with DisableTorchFunctionSubclass():
        left = [x.grad_fn for x in tensors_in((out,))]
        seen: set[Any] = {None, *before}
        while left:
            node = left.pop()
            if node not in seen:
                seen.add(node)
                saved = tensors_in([getattr(node, name) for name in dir(node) if name.startswith("_saved_")])
                if any(isinstance(x, TorchDTensor) and all(x is not y for y in known) for x in saved):
                    return True
                left += [following for following, _ in node.next_functions]
    return False


_TERM = (
    "{0}: a plain tensor of one element beside a DTensor that wants a gradient, made of parameters that each "
    "rank computes with for itself over {1}: this rank's own term, by which the gradient would be another "
    "one on each rank\n"
    "  fix: shardwright.grads.global_mean(term, 1, mesh), which is the same on all of them; or weigh it in "
    "the forward of the module that owns the parameter"
)


def _own_axes(term: Tensor, meshes: list[DeviceMesh]) -> list[str]:
    """The axes of one of the meshes on which the ranks' terms are made of their own rows."""
    named = {axis for mesh in meshes for axis in axis_names(mesh)}
    for axes in _leaves(term):
        shared = [axis for axis in axes if axis in named]
        if shared:
            return shared
    return []


def _leaves(term: Tensor) -> Iterator[tuple[str, ...]]:
    """Of each parameter that a graph reads: the axes whose ranks compute with it for themselves."""
    seen: set[Any] = set()
    left: list[Any] = [term.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen or _is_same_everywhere(node):
            continue
        seen.add(node)
        if function_of(node) is Localize:
            use = node.spec.use
            yield () if use is None else tuple(use.axes)
        variable = getattr(node, "variable", None)
        sharded: Any = None if variable is None else sharded_behind(variable)
        if sharded is not None:
            yield (sharded._fully_sharded,)
        left += [following for following, _ in node.next_functions]


def _is_same_everywhere(node: Any) -> bool:
    """Is what it gives the same on all ranks, by a reduction over them?"""
    if getattr(function_of(node), "same_on_all_ranks", False):
        return True
    return any(name in node.name() for name in ("AllReduce", "all_reduce"))  # torch's, of three packages

"""The edge between an erased function and the program around it, for autograd.

The results of a call that want gradients hang on one node. Its backward is the recorded one, or that of the
call's own graph, run here so that what it sends is what a replay sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardwright.comm.traced import in_groups
from shardwright.compat import DisableTorchFunctionSubclass, preserve_version_counter, view_again
from shardwright.compat.fully_shard.parameters import gathered_by_units
from shardwright.erased.containers import Containers, taken_apart, with_leaves
from shardwright.erased.refuse import Refusal
from shardwright.tensor.autograd import apply, keep_pending
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.localized import LocalizedDTensor

Gradients = Sequence[torch.Tensor | None]
Backward = Callable[[Gradients], Gradients]


class Edge(torch.autograd.Function):
    """Results without a graph, and the backward that stands for it."""

    @staticmethod
    def forward(  # noqa: D102 - torch's protocol
        ctx: Any, results: Callable[[], tuple[torch.Tensor, ...]], backward: Backward, *_: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.run = backward
        ctx.set_materialize_grads(False)
        return results()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:  # noqa: D102
        return None, None, *ctx.run(gradients)


def hang(
    results: Callable[[], tuple[torch.Tensor, ...]], backward: Backward, inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The results, whose gradients go through `backward` to the inputs."""

    def run(gradients: Gradients) -> Gradients:
        found = backward(gradients)
        if not torch.is_grad_enabled():
            for x, gradient in zip(inputs, found, strict=True):
                if isinstance(x, LocalizedDTensor) and x.is_leaf and isinstance(gradient, DTensor):
                    keep_pending(x, gradient._spec.layout)  # as `Localize` does, which no replay meets
        return found

    with DisableTorchFunctionSubclass():
        made: tuple[torch.Tensor, ...] = Edge.apply(results, run, *inputs)  # type: ignore[no-untyped-call]
    return made


class _Same(torch.autograd.Function):
    """The same memory, and no leaf: the call may write it in place."""

    @staticmethod
    def forward(_: Any, end: torch.Tensor) -> torch.Tensor:
        return end.detach()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _Written(torch.autograd.Function):
    """What was given, with the graph of what the call wrote into it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        ctx.of_view = x._is_view()
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        # Of a view torch takes none for "nothing of its base", not for zeros at what was written.
        before = torch.zeros_like(gradient) if ctx.of_view and ctx.needs_input_grad[0] else None
        return before, gradient


@dataclass(frozen=True, slots=True)
class Cut:
    """Arguments whose graphs end here: the graph of the call is its own, and no gradient counts twice.

    Asked for the gradient of a parameter and of an argument that was computed from it, autograd would give
    the parameter's along both ways. Arguments that are views of one tensor are so again, of what stands for
    that tensor: a write into one of them is one into the others.

    ends: leaves that share the memory of what has a graph. originals: what was given, by the `id` of its
    end and of what the call gets for it. nodes: each tensor that the call gets, and its node before.
    unwritten: of ends of what the call wrote, by `id`: what has the graph from before.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    containers: Containers
    originals: dict[int, torch.Tensor]
    ends: tuple[torch.Tensor, ...]
    nodes: dict[int, tuple[torch.Tensor, Any]]
    unwritten: dict[int, torch.Tensor] = field(default_factory=dict)

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Cut:
        """The arguments; for tensors that have a graph others that share their memory."""
        ends: list[torch.Tensor] = []
        originals: dict[int, torch.Tensor] = {}
        for_it: dict[int, torch.Tensor] = {}
        given = args, kwargs
        leaves, _ = taken_apart(given)
        together = _views_of_one(leaves)

        def end_of(x: torch.Tensor) -> torch.Tensor:
            if _node(x) is None:
                return x
            of: Any = x._base if id(x) in together and x._is_view() else x
            if _node(of) is not None and id(of) not in for_it:
                ends.append(of.detach().requires_grad_())
                for_it[id(of)] = apply(_Same, ends[-1])
                originals[id(ends[-1])] = originals[id(for_it[id(of)])] = of
            if id(x) not in for_it:
                for_it[id(x)] = view_again(x, for_it.get(id(of), of))
                originals[id(for_it[id(x)])] = x
            return for_it[id(x)]

        got = given  # the very lists, where nothing stands for what they hold
        if torch.is_grad_enabled():
            got = with_leaves(given, [end_of(x) if isinstance(x, torch.Tensor) else x for x in leaves])
        containers = Containers.of(given, got)
        tensors = [x for x in containers.leaves if isinstance(x, torch.Tensor)]
        nodes = {id(x): (x, _node(x)) for x in tensors}
        return Cut(*got, containers, originals, tuple(ends), nodes)

    def beside(self, other: Cut) -> Cut:
        """Where the graphs of both end."""
        unwritten = {**other.unwritten, **self.unwritten}
        originals = {**other.originals, **self.originals}
        return replace(self, originals=originals, ends=(*other.ends, *self.ends), unwritten=unwritten)

    def original(self, x: Any) -> Any:
        """What was given, for what stood for it."""
        return self.originals.get(id(x), x)

    def goes_on_at(self, x: torch.Tensor) -> torch.Tensor:
        """What the graph that ends in this leaf goes on with, around the call."""
        found: torch.Tensor = self.unwritten.get(id(x), self.original(x))
        return found

    def keep_graph_of(self, x: torch.Tensor) -> None:
        """The call wrote what was given: derivatives of its backward still go on where that came from."""
        for end in self.ends:
            original = self.original(end)
            if (original is x or original is x._base) and id(end) not in self.unwritten:
                self.unwritten[id(end)] = apply(_Same, original)

    def stands_for(self, x: Any) -> Any:
        """What the call gets for it, or for what ends there."""
        x = self.original(x)
        return next((y for y, _ in self.nodes.values() if self.original(y) is x), x)

    def written(self) -> list[torch.Tensor]:
        """What the call gave another graph by writing it in place."""
        return [x for x, node in self.nodes.values() if _node(x) is not node]

    def pass_on(self) -> bool:
        """Hand on what a backward inside left at the ends; was there anything?"""
        reached = {self.original(x): g for x, g in zip(self.ends, self.taken(), strict=True) if g is not None}
        if reached:
            torch.autograd.backward(list(reached), list(reached.values()))
        return bool(reached)

    def taken(self) -> Gradients:
        """The gradients of the ends, which have none afterwards."""
        found = [x.grad for x in self.ends]
        for x in self.ends:
            x.grad = None
        return found


def behind_edge(
    results: Sequence[torch.Tensor],
    cut: Cut,
    run: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Gradients], Gradients],
) -> Sequence[torch.Tensor]:
    """The results of a call, which hang on the graphs around it.

    Args: run: the backward from results to inputs. Where that can only be run as a whole, it fills the
        gradients of leaves, and its own graph ends at the arguments alone.
    """
    inputs: Sequence[torch.Tensor] = inputs_of(results)
    if as_a_whole(results, inputs):
        inputs = cut.ends

        def run(results: Any, _inputs: Any, gradients: Gradients) -> Gradients:
            asked = [i for i, g in enumerate(gradients) if g is not None]
            with in_groups():
                torch.autograd.backward(
                    [results[i] for i in asked],
                    [gradients[i] for i in asked],
                    retain_graph=True,
                    create_graph=torch.is_grad_enabled(),
                )
            return cut.taken()

    if not inputs:
        return results

    def backward(gradients: Gradients) -> Gradients:
        if torch.is_grad_enabled():
            return _differentiable(lambda given: run(results, inputs, given), cut, gradients)
        return run(results, inputs, gradients)

    around = [cut.goes_on_at(x) for x in inputs]
    return hang(lambda: tuple(x.detach() for x in results), backward, around)


def _differentiable(run: Backward, cut: Cut, gradients: Gradients) -> Gradients:
    """A backward that is differentiated again: its graph ends where the call's does, so it has an edge."""
    of_gradients = Cut.of(tuple(gradients), {})
    found = [*run(of_gradients.args)]
    hanging = {place: x for place, x in enumerate(found) if x is not None and has_graph(x)}
    made = behind_edge([*hanging.values()], of_gradients.beside(cut), own_backward)
    for place, x in zip(hanging, made, strict=True):
        found[place] = x
    return found


def given_back(
    results: Sequence[torch.Tensor],
    cut: Cut,
    hung: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
) -> list[torch.Tensor]:
    """Results that want gradients as what they are to the program around, and what the call wrote too.

    A view of what was given, or of another result, is one again: a write through it reaches that.

    Args: hung: results behind the edge.
    """
    written = cut.written()
    made = hung([*results, *(apply(_Same, x) for x in written)])  # the graph that each has now
    for x, new in zip(written, made[len(results) :], strict=True):
        cut.keep_graph_of(cut.original(x))
        with preserve_version_counter(cut.original(x)):  # the call has written it, and counted that
            apply(_Written, cut.original(x), new)
    known = {id(x): new for x, new in zip(results, made, strict=False)}
    known |= {place: cut.original(x) for place, (x, _) in cut.nodes.items()}
    return [_as_view(x, known) for x in results]


def _views_of_one(leaves: Iterable[Any]) -> set[int]:
    """Which of these tensors, by `id`, share a base with another one, or are the base of one."""
    of_base: dict[int, set[int]] = {}
    for x in leaves:
        if isinstance(x, torch.Tensor) and _node(x) is not None:
            of_base.setdefault(id(_root(x)), set()).add(id(x))
    return {each for found in of_base.values() if len(found) > 1 for each in found}


def _root(x: torch.Tensor) -> torch.Tensor:
    base = x._base if x._is_view() else None
    return x if base is None else base


def _as_view(x: torch.Tensor, known: dict[int, torch.Tensor]) -> torch.Tensor:
    base = x._base if x._is_view() else None
    return known[id(x)] if base is None or id(base) not in known else view_again(x, known[id(base)])


def as_a_whole(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Refusal | None:
    """Why the graph of the results cannot be asked for the gradients of its inputs."""
    if any(map(has_hooks, inputs)):
        return Refusal("a hook on a gradient", "it would run twice")
    if any(node.name() == "CheckpointFunctionBackward" for node in _nodes(results)):
        return Refusal("a reentrant checkpoint", "it fills gradients by itself")
    units = gathered_by_units()
    if units and any(id(x) in units for x in inputs):
        return Refusal("a sharded unit", "it takes the gradients of what it gathered by itself")
    return None


def inputs_of(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves at which the graph of the results ends.

    Read from the graph: no list of parameters can miss one.
    """
    leaves = [getattr(node, "variable", None) for node in _nodes(results)]
    return list({id(leaf): leaf for leaf in leaves if leaf is not None}.values())


def _nodes(results: Sequence[torch.Tensor]) -> list[Any]:
    seen: dict[Any, None] = {}
    todo: list[Any] = [x.grad_fn for x in results]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen[node] = None
            todo.extend(following for following, _ in node.next_functions)
    return list(seen)


def own_backward(
    results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    """The backward of the call's own graph, down to its inputs."""
    asked = [(x, g) for x, g in zip(results, gradients, strict=True) if g is not None]
    if not asked:
        return (None,) * len(inputs)
    with in_groups(), _without_gradients(inputs):
        return torch.autograd.grad(
            [x for x, _ in asked],
            list(inputs),
            [g for _, g in asked],
            retain_graph=True,
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )


@contextmanager
def _without_gradients(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """What runs depends on no gradient that the leaves have: a replay may find others, or none."""
    with DisableTorchFunctionSubclass():
        before = [x.grad for x in leaves]
        for x in leaves:
            x.grad = None
    try:
        yield
    finally:
        with DisableTorchFunctionSubclass():
            for x, gradient in zip(leaves, before, strict=True):
                x.grad = gradient


def has_hooks(x: torch.Tensor) -> bool:
    """Would a hook on its gradient run twice, here and where the gradient arrives?"""
    return bool(getattr(x, "_backward_hooks", None))


def with_edge(out: Any, cut: Cut) -> Any:
    """The results, with their own backward behind the edge that a replay has.

    So has what the call put into lists that it was given.
    """
    changed = cut.containers.changed()
    leaves, _ = taken_apart((out, cut.containers.got if changed else None))
    hanging = [*{id(x): x for x in leaves if has_graph(x) and id(x) not in cut.nodes}.values()]
    made = given_back(hanging, cut, lambda results: behind_edge(results, cut, own_backward))
    known = {id(x): new for x, new in zip(hanging, made, strict=True)}

    def original(x: Any) -> Any:
        return known.get(id(x), cut.original(x))

    if changed:
        cut.containers.hand_back(original)
    return with_leaves(out, [*map(original, taken_apart(out)[0])])


def has_graph(x: Any) -> bool:
    """Is it a tensor that was computed, and wants a gradient?"""
    return isinstance(x, torch.Tensor) and _node(x) is not None


def _node(x: torch.Tensor) -> Any:
    """None of a view from under `no_grad` whose base was written since: torch refuses to say."""
    try:
        return x.grad_fn
    except RuntimeError:
        return None

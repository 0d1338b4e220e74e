"""The edge between an erased function and the program around it, for autograd.

The results of a call that want gradients hang on one node. Its backward is the recorded one, or that of the
call's own graph, run here so that what it sends is what a replay sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.comm.traced import in_groups
from shardwright.compat import DisableTorchFunctionSubclass, tree_map_only
from shardwright.erased.refuse import Refusal

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
    with DisableTorchFunctionSubclass():
        made: tuple[torch.Tensor, ...] = Edge.apply(results, backward, *inputs)  # type: ignore[no-untyped-call]
    return made


@dataclass(frozen=True, slots=True)
class Cut:
    """Arguments whose graphs end here: the graph of the call is its own, and no gradient counts twice.

    Asked for the gradient of a parameter and of an argument that was computed from it, autograd would give
    the parameter's along both ways.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    originals: dict[int, torch.Tensor]
    ends: tuple[torch.Tensor, ...]

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Cut:
        """The arguments; tensors that have a graph as leaves that share their memory."""
        ends: dict[int, torch.Tensor] = {}
        originals: dict[int, torch.Tensor] = {}

        def end_of(x: torch.Tensor) -> torch.Tensor:
            if x.grad_fn is None:
                return x
            if id(x) not in ends:
                ends[id(x)] = x.detach().requires_grad_()
                originals[id(ends[id(x)])] = x
            return ends[id(x)]

        if torch.is_grad_enabled():
            args, kwargs = tree_map_only(torch.Tensor, end_of, (args, kwargs))
        return Cut(args, kwargs, originals, tuple(ends.values()))

    def original(self, x: Any) -> Any:
        """What was given, for what stood for it."""
        return self.originals.get(id(x), x)

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
    around = [cut.original(x) for x in inputs]
    return hang(
        lambda: tuple(x.detach() for x in results), lambda gradients: run(results, inputs, gradients), around
    )


def as_a_whole(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Refusal | None:
    """Why the graph of the results cannot be asked for the gradients of its inputs."""
    if any(map(has_hooks, inputs)):
        return Refusal("a hook on a gradient", "it would run twice")
    if any(node.name() == "CheckpointFunctionBackward" for node in _nodes(results)):
        return Refusal("a reentrant checkpoint", "it fills gradients by itself")
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
    with in_groups():
        return torch.autograd.grad(
            [x for x, _ in asked],
            list(inputs),
            [g for _, g in asked],
            retain_graph=True,
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )


def has_hooks(x: torch.Tensor) -> bool:
    """Would a hook on its gradient run twice, here and where the gradient arrives?"""
    return bool(getattr(x, "_backward_hooks", None))


def has_graph(x: Any) -> bool:
    """Not a view from under `no_grad` whose base was written since: torch refuses to say."""
    try:
        return isinstance(x, torch.Tensor) and x.grad_fn is not None
    except RuntimeError:
        return False

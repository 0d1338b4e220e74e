"""The edge between an erased function and the program around it, for autograd.

The results of a call that want gradients hang on one node. Its backward is the recorded one, or that of the
call's own graph, run here so that what it sends is what a replay sends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwright.compat import DisableTorchFunctionSubclass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Backward = Callable[[Sequence[torch.Tensor | None]], Sequence[torch.Tensor | None]]


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


def inputs_of(results: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Where the graph of the results ends: leaves, and what was given with a graph of its own.

    Read from the graph: no list of parameters can miss one.
    """
    ends = {x.grad_fn: x for x in given if x.grad_fn is not None}
    found: dict[int, torch.Tensor] = {}
    seen: set[Any] = set()
    todo = [x.grad_fn for x in results]
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        end = ends.get(node) if node in ends else getattr(node, "variable", None)
        if end is not None:
            found[id(end)] = end
            if node in ends:  # several results of one node may be given
                found.update((id(x), x) for x in given if x.grad_fn is node)
        else:
            todo.extend(following for following, _ in node.next_functions)
    return list(found.values())


def own_backward(
    results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    """The backward of the call's own graph, down to its inputs."""
    asked = [(x, g) for x, g in zip(results, gradients, strict=True) if g is not None]
    if not asked:
        return (None,) * len(inputs)
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

"""`_foreach_*` and `_fused_*` on lists that hold DTensors in some positions and plain tensors in others.

Each position is a call of its own, so nobody has to know where the plain ones live: they meet plain ones
alone. Such is the step of an optimizer over a model of which parts are placed: on CUDA it takes lists unless
it is told otherwise.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.rules.call import Args

# What they say of a part of a tensor is nothing about the tensor: where a plain one lives matters.
_OF_WHOLE_TENSORS = frozenset({"_foreach_norm", "_foreach_max", "_foreach_powsum"})


def positions_apart(func: Any, args: Args, kwargs: dict[str, Any]) -> list[list[int]] | None:
    """The positions that hold a DTensor, and those of plain tensors; None where it is no such call.

    A plain tensor beside a DTensor in one position is refused by the call on these positions, the first one.
    """
    name = getattr(func, "__name__", "")
    if not name.startswith(("_foreach_", "_fused_")) or name in _OF_WHOLE_TENSORS:
        return None
    given = (*args, *kwargs.values())
    lists = [value for value in given if isinstance(value, list | tuple) and value]
    lengths = set(map(len, lists))
    if len(lengths) != 1 or any(isinstance(value, TorchDTensor) for value in given):
        return None
    found: list[list[int]] = [[], []]
    for number, position in enumerate(zip(*lists, strict=True)):
        found[0 if any(isinstance(x, TorchDTensor) for x in position) else 1].append(number)
    return found if all(found) else None


def in_turn(func: Any, args: Args, kwargs: dict[str, Any], apart: list[list[int]]) -> Any:
    """The call on each kind of positions; what it returns in the order of the lists."""
    results: dict[int, Any] = {}
    out: Any = None
    for positions in apart:

        def some(value: Any, at: list[int] = positions) -> Any:
            return [value[i] for i in at] if isinstance(value, list | tuple) and value else value

        out = func(*map(some, args), **{name: some(value) for name, value in kwargs.items()})
        results.update(zip(positions, out or (), strict=False))
    return None if out is None else type(out)(results[i] for i in sorted(results))

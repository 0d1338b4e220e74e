"""The refusal of a plain tensor beside a DTensor: where each operand lives, and a way out that was tried.

Tried: the call is run on tensors without data, the plain ones distributed as the text proposes, where nothing
may communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import asked_by_context_parallel, tree_map_only
from shardwright.errors import RuleError
from shardwright.layout.layout import Layout
from shardwright.layout.of_tensor import layout_of
from shardwright.placement.base import Placement, Replicate
from shardwright.rules.call import Args
from shardwright.rules.fix import mapping_code
from shardwright.rules.refusal import scene
from shardwright.tensor.explicit_mode import explicit
from shardwright.tensor.spec import spec_of
from shardwright.tensor.wrap import wrap

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def plain_beside(name: str, x: torch.Tensor) -> str:
    """The refusal where no more is known than the op and the plain tensor."""
    return "\n".join([_headline(name, x), *_ways_out("x", "placements", checked=False)])


def plain_among(func: Any, args: Args, kwargs: dict[str, Any], x: torch.Tensor, run: Run) -> str:
    """The refusal of `x` among the arguments of a function of torch.

    Args: run: how the function is called on DTensors; used to try what the text proposes.
    """
    name = getattr(func, "__name__", str(func))
    tensors = list(tensors_in((*args, *kwargs.values())))
    ours = [t for t in tensors if isinstance(t, TorchDTensor)]
    names = {id(t): f"operand {i}" for i, t in enumerate(tensors)}
    said: dict[str, object] = {
        names[id(t)]: layout_of(t)
        if isinstance(t, TorchDTensor)
        else f"plain tensor of shape {tuple(t.shape)}"
        for t in tensors
    }
    lines = scene(_headline(name, x), said, {names[id(x)]: "the whole tensor, or this rank's part of one?"})
    if asked_by_context_parallel():
        return "\n".join([*lines, _CUT_SEQUENCE])
    for placements in _proposals(x, ours):
        if _runs(func, args, kwargs, placements, run):
            text = mapping_code(dict(zip(layout_of(ours[0]).axes, placements, strict=True)))
            return "\n".join([*lines, *_ways_out(names[id(x)].replace(" ", "_"), text, checked=True)])
    return "\n".join([*lines, *_ways_out(names[id(x)].replace(" ", "_"), "placements", checked=False)])


_CUT_SEQUENCE = (
    "  fix:  torch's context_parallel cuts plain ones; shardwright.parallel.cut_sequence(batch, mesh) cuts "
    "a batch, and parallelize_context(module, mesh) takes the place of the block"
)


def _headline(name: str, x: torch.Tensor) -> str:
    return f"{name}: a plain tensor of shape {tuple(x.shape)} beside a DTensor: where does it live?"


def _ways_out(x: str, placements: str, *, checked: bool) -> list[str]:
    head = "fix (checked):" if checked else "fix:          "
    ways = {
        f"sw.distribute_tensor({x}, mesh, {placements})": "if every rank (or rank 0) has the whole tensor",
        f"sw.DTensor.from_local({x}, mesh, placements)": "if each rank has its own part",
        "with sw.spmd(mesh): ...": "if the block is a single-device program",
    }
    width = max(map(len, ways))
    heads = [head, "or:".rjust(len(head)), "or:".rjust(len(head))]
    return [f"  {h} {way:<{width}}  {when}" for h, (way, when) in zip(heads, ways.items(), strict=True)]


def tensors_in(values: Sequence[Any]) -> Iterator[Any]:
    """The tensors among arguments, those in lists included."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def _proposals(x: torch.Tensor, ours: list[Any]) -> Iterator[tuple[Placement, ...]]:
    """The placements of a DTensor of the same shape, unless it is pending; then whole on every rank."""
    for other in ours:
        layout = layout_of(other)
        if layout.shape == tuple(x.shape) and not layout.pending_axes:
            yield layout.placements
    yield (Replicate(),) * ours[0].device_mesh.ndim


def _runs(func: Any, args: Args, kwargs: dict[str, Any], placements: tuple[Placement, ...], run: Run) -> bool:
    """Whether the call needs no communication with its plain tensors placed so."""
    mesh = next(t for t in tensors_in((*args, *kwargs.values())) if isinstance(t, TorchDTensor)).device_mesh

    def blank(x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, TorchDTensor):
            layout, local = layout_of(x), x._local_tensor.shape
        else:
            layout = Layout(mesh, placements, tuple(x.shape), dtype=x.dtype, stride=tuple(x.stride()))
            local = torch.Size(layout.local_shape(tuple(mesh.get_coordinate() or (0,) * mesh.ndim)))
        return wrap(torch.empty(local, dtype=layout.dtype, device="meta"), spec_of(layout, mesh))

    try:
        tried_args, tried_kwargs = tree_map_only(torch.Tensor, blank, (args, kwargs))
        with torch.no_grad(), explicit():
            run(func, tried_args, tried_kwargs)
    except (RuleError, RuntimeError, ValueError, TypeError):
        return False
    return True

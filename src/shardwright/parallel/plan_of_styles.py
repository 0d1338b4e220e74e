"""A plan of torch's styles, applied to each module once, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardwright.compat import tree_map
from shardwright.errors import ParallelError
from shardwright.layout.of_tensor import layout_of
from shardwright.parallel.names import matches
from shardwright.parallel.styles import for_torch
from shardwright.tensor.autograd import Adopt, apply
from shardwright.tensor.modules.distribute import carry_over
from shardwright.tensor.modules.slots import slots_of, unchanged_on_error

Styles = Mapping[str, ParallelStyle]  # by patterns of modules
_PLACING = (ColwiseParallel, RowwiseParallel, SequenceParallel)


class Styled(NamedTuple):
    """A module that a pattern names, and its style."""

    path: str
    module: nn.Module
    style: ParallelStyle


def apply_styles(module: nn.Module, mesh: DeviceMesh, plan: Styles, source: int | None) -> None:
    """Apply every style to the modules that its pattern names, in the order of the plan.

    A module that stands in several places (a layer that two blocks share) is styled once.

    Raises: ParallelError: a pattern that names nothing, two styles for one shared module, parameters that
        are placed already, a module that a style does not take; nothing has been changed then.
    """
    found = list(_once_each(module, plan))
    for styled in found:
        _refuse_placed(styled)
    with unchanged_on_error(module):
        for styled in found:
            _apply(styled, mesh, source)


def _once_each(module: nn.Module, plan: Styles) -> Iterator[Styled]:
    seen: dict[nn.Module, Styled] = {}
    for pattern, style in plan.items():
        named = [(path, child) for path, child in _modules(module) if matches(path, pattern)]
        if not named:
            some = ", ".join(name for name, _ in list(module.named_children())[:6])
            raise ParallelError(f"no module is named {pattern!r}; {type(module).__name__} has {some}")
        for path, child in named:
            first = seen.get(child)
            if first is None or first.path == path:
                seen[child] = Styled(path, child, style)
                yield seen[child]
            elif not _alike(first.style, style):
                raise ParallelError(
                    f"{first.path} and {path} are one module, and the plan has two styles for it: "
                    f"{type(first.style).__name__} and {type(style).__name__}; name one style for both"
                )


def _modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every path of every module: one that is shared has several."""
    yield from module.named_modules(remove_duplicate=False)


def _alike(one: ParallelStyle, other: ParallelStyle) -> bool:
    return one is other or (type(one) is type(other) and vars(one) == vars(other))


def _refuse_placed(styled: Styled) -> None:
    """Torch's styles cut plain tensors; what they would make of a placed one is another parameter."""
    for name, parameter in styled.module.named_parameters(recurse=False):
        if isinstance(styled.style, _PLACING) and isinstance(parameter, TorchDTensor):
            raise ParallelError(
                f"{styled.path}.{name} is placed already ({layout_of(parameter)}), so "
                f"{type(styled.style).__name__} cannot cut it; apply tensor parallelism before the "
                "strategies that place parameters over data ranks"
            )


def _apply(styled: Styled, mesh: DeviceMesh, source: int | None) -> None:
    before = [(slot, slot.get()) for slot in slots_of(styled.module)]
    try:
        parallelize_module(styled.module, mesh, for_torch(styled.style), src_data_rank=source)
    except NotImplementedError as error:
        raise ParallelError(
            f"{styled.path}: {type(styled.style).__name__} does not take a {type(styled.module).__name__} "
            f"({error}); name the placements of its parameters instead"
        ) from error
    for slot, old in before:
        _like(old, slot.get())
    styled.module.register_forward_pre_hook(_as_ours, with_kwargs=True)


def _as_ours(_module: nn.Module, args: Any, kwargs: Any) -> Any:
    """What a style has made of the inputs, as ours: torch takes apart what it has of its own class alone.

    A norm over several dims then writes where its own rules refuse to, before it meets a parameter. Not while
    Dynamo traces: it knows no spec of torch's as a value that a hook may read.
    """
    if torch.compiler.is_compiling():
        return args, kwargs
    return tree_map(lambda x: apply(Adopt, x) if type(x) is TorchDTensor else x, (args, kwargs))


def _like(old: nn.Parameter, new: nn.Parameter) -> None:
    """What a style put in a parameter's place stays frozen, and keeps attributes and hooks.

    Torch's `SequenceParallel` and `distribute_module` make trainable parameters of frozen ones.
    """
    if new is not old:
        new.requires_grad_(old.requires_grad)
        carry_over(old, new)

"""What surrounds a module whose sequences are cut: some arguments are cut, the rest counts as replicated."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.nn import functional

from shardwright.compat import tree_map_only
from shardwright.compat.dynamo import compiles_what_is_called
from shardwright.errors import ParallelError
from shardwright.placement.base import Partition
from shardwright.tensor.attention.asked import Asked, begin, end
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.plain.spmd import spmd
from shardwright.tensor.wrap import as_ours

_ATTENTION = functional.scaled_dot_product_attention
_REPLACED = (
    "something has replaced torch.nn.functional.scaled_dot_product_attention, as torch's context_parallel "
    "does in its block: a module that parallelize_context placed needs no such block\n"
    "  fix: call it outside of the block; attention='ring' or 'all_to_all' chooses how keys travel"
)
_COMPILED = (
    "a module that parallelize_context placed runs as it is, not under torch.compile: which positions a rank "
    "holds would be compiled into its graphs, and ranks would not send alike\n"
    "  fix: call the module itself, compile nothing inside of it; torch.compile parts that are not placed"
)
_DIM = 1  # of the sequence in [batch, sequence, ...]


class SequenceScope:
    """Hooks of one module; each call of the module opens a block and closes it, errors included.

    Args:
        axis: that cuts the sequence.
        cut: argument -> dim of its sequence; empty: the first tensor, along dim 1.
        placement: of a sequence, from its dim.
        asked: how attention goes.
        output: "cut" or "whole".
    """

    mesh: DeviceMesh  # on which the module computes: the axis, and those that placed the parameters before

    def __init__(
        self,
        axis: str,
        cut: Mapping[str, int],
        placement: Callable[[int], Partition],
        asked: Asked,
        output: str,
    ) -> None:
        self.axis, self.cut, self.placement, self.asked, self.output = axis, cut, placement, asked, output
        self._open: list[spmd] = []
        self._signature = inspect.Signature()
        self._compared = False

    def check_arguments(self, module: nn.Module) -> None:
        """Raises: ParallelError: `cut` names what the forward does not take, or a dim that is no number."""
        for name, dim in self.cut.items():
            if type(dim) is not int:
                raise ParallelError(
                    f"parallelize_context: cut[{name!r}]={dim!r:.60} is no dim\n"
                    "  fix: cut={argument: dim of its sequence}"
                )
        self._signature = inspect.signature(module.forward)
        known = self._signature.parameters
        if any(p.kind is p.VAR_KEYWORD for p in known.values()):
            return
        for name in self.cut:
            if name not in known:
                raise ParallelError(
                    f"parallelize_context: {type(module).__name__}.forward takes no argument {name!r}; it "
                    f"takes {', '.join(known)}"
                )

    def enter_with(self, module: nn.Module) -> None:
        """From now on every call of the module is inside the scope.

        What a checkpoint runs again in a backward begins further in: the modules there know the way of
        attention too.
        """
        module.register_forward_pre_hook(self._begin, with_kwargs=True)
        module.register_forward_hook(self._end, with_kwargs=True, always_call=True)
        for child in module.modules():
            if child is not module and any(True for _ in child.children()):
                child.register_forward_pre_hook(self._begin_inner)
                child.register_forward_hook(self._end_inner, always_call=True)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _refuse_compiled()
        if functional.scaled_dot_product_attention is not _ATTENTION:
            raise ParallelError(_REPLACED)
        block = spmd(self.mesh, check=not self._compared)
        begin(self.asked, module)
        self._open.append(block.__enter__())
        given = self._bound(module, args, kwargs)  # from here on an error finds the block open, and `_end`
        changed = {id(value): self._cut(value, dim, name, block) for name, value, dim in given}
        self._compared = True
        return (
            tuple(changed.get(id(value), value) for value in args),
            {name: changed.get(id(value), value) for name, value in kwargs.items()},
        )

    def _end(self, module: nn.Module, _: tuple[Any, ...], __: dict[str, Any], out: Any) -> Any:
        if end(module):
            self._open.pop().__exit__(None, None, None)
        return tree_map_only(TorchDTensor, lambda x: x.full_tensor(), out) if self.output == "whole" else None

    def _begin_inner(self, module: nn.Module, *_: Any) -> None:
        _refuse_compiled()
        begin(self.asked, module)

    def _end_inner(self, module: nn.Module, *_: Any) -> None:
        end(module)

    def _bound(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[str, torch.Tensor, int]]:
        """The arguments to cut: name, value, dim."""
        arguments = dict(self._signature.bind_partial(*args, **kwargs).arguments)
        for parameter in self._signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments.update(arguments.pop(parameter.name, {}))
        tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
        if self.cut:
            return [(name, tensors[name], dim) for name, dim in self.cut.items() if name in tensors]
        first = next(iter(tensors), None)
        if first is None:
            raise ParallelError(
                f"{type(module).__name__}: no tensor among the arguments {', '.join(arguments) or '(none)'} "
                "whose sequence could be cut\n  fix: parallelize_context(..., cut={argument: dim})"
            )
        return [(first, tensors[first], _DIM)]

    def _cut(self, value: torch.Tensor, dim: int, name: str, block: spmd) -> torch.Tensor:
        if not -value.ndim <= dim < value.ndim:
            raise ParallelError(
                f"argument {name!r} has shape {tuple(value.shape)}, and no dim {dim} for a sequence\n"
                "  fix: parallelize_context(..., cut={argument: dim of its sequence})"
            )
        placed = as_ours(value) if isinstance(value, TorchDTensor) else block.replicated(value)
        if self.axis not in placed._spec.layout.axes or not self._is_whole(placed):
            return value if isinstance(value, TorchDTensor) else placed
        return placed.redistribute({self.axis: self.placement(dim % value.ndim)})

    def _is_whole(self, x: DTensor) -> bool:
        layout = x._spec.layout
        return layout.placements[layout.axes.index(self.axis)].is_replicated


def find_scope(module: nn.Module) -> SequenceScope | None:
    """The scope that a module's own calls open, if there is one."""
    for hook in module._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, SequenceScope) and getattr(hook, "__func__", None) is SequenceScope._begin:
            return owner
    return None


def _refuse_compiled() -> None:
    if compiles_what_is_called():
        raise ParallelError(_COMPILED)

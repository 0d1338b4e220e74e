"""A parameter and the gradient of it that this rank has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.errors import ParallelError
from shardwright.grads.state import SUM, GradientState
from shardwright.layout.layout import Layout
from shardwright.remember import remembered
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.spec import spec_of
from shardwright.tensor.wrap import as_ours, wrap


@dataclass(frozen=True)
class Entry:
    """One parameter, `placed` as ours, with its name."""

    name: str
    parameter: TorchDTensor
    placed: DTensor

    @property
    def gradient(self) -> DTensor:
        """Its gradient. Raises: ParallelError: it has none."""
        gradient = self.parameter.grad
        if not isinstance(gradient, TorchDTensor):  # pragma: no cover - `GradientState.of` refused it
            raise ParallelError(f"the gradient of {self.name} is missing")
        return as_ours(gradient)

    def state(self) -> GradientState:
        """What has become of its gradient on this rank."""
        return GradientState.of(self.name, self.parameter.grad, self.placed)

    def term(self, own: GradientState, pending: tuple[bool, ...]) -> Tensor:
        """What this rank adds to a sum over the pending axes.

        Zeros where it has no gradient; where its gradient is finished on one of the axes, the first coord of
        the axis holds all of it.
        """
        if own.missing:
            return torch.zeros_like(self.placed._local_tensor)
        mesh = self.placed.device_mesh
        local = self.gradient._local_tensor
        for axis, (wanted, is_term) in enumerate(zip(pending, own.pending, strict=True)):
            if wanted and not is_term:
                local = SUM.embed(local, mesh.size(axis), mesh.get_local_rank(axis))
        return local

    def put(self, local: Tensor, like: Layout | None = None) -> None:
        """Make `local` the gradient, in the parameter's placements.

        like: the layout of the gradient that was there, with its strides and dtype; None: the parameter's.
        """
        layout = self.placed._spec.layout
        if like is not None:
            layout = _placed_as(like, layout)
        self.parameter.grad = wrap(local, spec_of(layout, self.placed.device_mesh))


@remembered(4096)
def _placed_as(gradient: Layout, parameter: Layout) -> Layout:
    return gradient.with_placements(parameter.placements, order=parameter.order_names)

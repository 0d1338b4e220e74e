"""A parameter and the gradient of it that this rank has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import DisableTorchFunctionSubclass
from shardwright.errors import ParallelError
from shardwright.grads.state import SUM, GradientState
from shardwright.remember import remembered
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.spec import Spec, Token, spec_of
from shardwright.tensor.wrap import as_ours, wrap


@dataclass(slots=True)
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

    def put(self, local: Tensor) -> None:
        """Make `local` the gradient, in the parameter's layout."""
        token = self.placed._spec.token
        gradient = wrap(local, spec_like(token, token))
        with DisableTorchFunctionSubclass():
            self.parameter.grad = gradient


@remembered(4096)
def spec_like(gradient: Token, parameter: Token) -> Spec:
    """The spec of a gradient in the placements of its parameter, its strides and dtype as they were."""
    have, want = gradient.spec.layout, parameter.spec.layout
    return spec_of(have.with_placements(want.placements, order=want.order_names), parameter.spec.mesh)

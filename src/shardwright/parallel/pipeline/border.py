"""What crosses from one stage to the next: local tensors, and the layouts that they have there.

What can have a gradient travels flat, with one element more: in its gradient it says whether there is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import axis_names
from shardwright.layout.layout import Layout
from shardwright.placement.base import Placement
from shardwright.tensor.autograd import FromLocal, Redistribute, apply, to_local
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.spec import LocalUse, finished, spec_of
from shardwright.tensor.wrap import as_ours

FindMesh = Callable[[tuple[str, ...]], "DeviceMesh"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor as the next stage must know it: its logical shape, and its layout where it is distributed.

    number: of a float, which travels as a tensor: what it was while the borders were learned. permuted: of a
    plain tensor, its dims from the slowest to the fastest in memory, where that is another order. use: of a
    parameter that computes as its local tensor, and of what is computed from it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: tuple[str, ...] = ()
    placements: tuple[Placement, ...] = ()
    order: tuple[str, ...] = ()
    stride: tuple[int, ...] = ()
    number: float | None = None
    permuted: tuple[int, ...] = ()
    use: LocalUse | None = None

    @classmethod
    def of(cls, x: Tensor) -> Leaf:
        """Describe a tensor."""
        if not isinstance(x, TorchDTensor):
            return cls(tuple(x.shape), x.dtype, permuted=_permuted(x))
        ours = as_ours(x)
        layout = ours._spec.layout
        return cls(
            tuple(layout.shape),
            x.dtype,
            axis_names(ours.device_mesh),
            tuple(layout.placements),
            tuple(layout.order_names),
            tuple(layout.stride),
            use=ours._spec.use,
        )

    @property
    def flows_back(self) -> bool:
        """Can it have a gradient?"""
        return self.number is None and (self.dtype.is_floating_point or self.dtype.is_complex)

    def layout(self, find: FindMesh) -> Layout:
        """The layout, on this rank's mesh of these axes."""
        return Layout(
            find(self.axes),
            self.placements,
            self.shape,
            dtype=self.dtype,
            stride=self.stride,
            order=self.order,
        )

    def local_shape(self, find: FindMesh) -> tuple[int, ...]:
        """What travels: the shape of this rank's part."""
        if not self.axes:
            return self.shape
        mesh = find(self.axes)
        layout = self.layout(find)
        coords = spec_of(layout, mesh).coords
        return tuple(layout.local_shape(coords or (0,) * len(layout.sizes)))

    def example(self, find: FindMesh) -> Tensor:
        """A tensor without memory that says what travels."""
        shape = self.local_shape(find)
        sent = (math.prod(shape) + 1,) if self.flows_back else shape
        return torch.empty(sent, dtype=self.dtype, device="meta", requires_grad=self.flows_back)

    def zeros(self, find: FindMesh, device: torch.device) -> Tensor:
        """What would arrive of a tensor like it, of zeros; the number where it is one."""
        if self.number is not None:
            return torch.tensor(self.number, dtype=self.dtype, device=device)
        graph = self.flows_back and torch.is_grad_enabled()
        sent = torch.zeros_like(self.example(find), device=device, requires_grad=graph)
        return arriving(sent, self, find)


def _permuted(x: Tensor) -> tuple[int, ...]:
    """The order of the dims in memory, for a tensor without gaps that is not contiguous."""
    order = tuple(sorted(range(x.ndim), key=lambda dim: (-x.stride()[dim], dim)))
    return order if not x.is_contiguous() and x.permute(order).is_contiguous() else ()


def in_memory(x: Tensor, leaf: Leaf) -> Tensor:
    """A copy with the strides that the tensor had where it was made."""
    if not leaf.permuted:
        return x.clone()
    back = sorted(range(x.ndim), key=leaf.permuted.__getitem__)
    return x.permute(leaf.permuted).clone(memory_format=torch.contiguous_format).permute(back)


def _flat(x: Tensor, flag: int) -> Tensor:
    """A copy that travels.  [...] -> [n + 1]"""
    return torch.cat((x.reshape(-1), x.new_full((1,), flag)))


class _Sent(torch.autograd.Function):
    """What travels of a value; it has a gradient even if the value has none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:  # noqa: ARG004  the anchor makes the graph
        ctx.shape = x.shape
        return _flat(x, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[:-1].view(ctx.shape), None


class _Received(torch.autograd.Function):
    """The value of what travelled, in memory of its own; its gradient says that there is one."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, shape: tuple[int, ...], leaf: Leaf) -> Tensor:  # noqa: ARG004
        return in_memory(sent[:-1].view(shape), leaf)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ARG004  torch's signature
        return _flat(grad, 1), None, None


def asked(gradients: Sequence[Tensor | None]) -> list[bool]:
    """Which of the gradients that came are some, not zeros in their places; the host waits for it."""
    return [g is not None and bool(g[-1]) for g in gradients]


def leaving(x: Tensor, leaf: Leaf, find: FindMesh, anchor: Tensor) -> Tensor:
    """What travels of `x`: this rank's part, in one piece.

    Its gradient comes back in the layout of `x`, pending sums finished.
    """
    if isinstance(x, TorchDTensor):
        x = _local(as_ours(x), leaf.layout(find))
    if not leaf.flows_back:
        return x.detach().contiguous()
    sent: Tensor = _Sent.apply(x, anchor)  # type: ignore[no-untyped-call]
    return sent


def _local(x: DTensor, layout: Layout) -> Tensor:
    if x._spec.layout != layout:
        x = x.redistribute(x.device_mesh, list(layout.placements), order=list(layout.order_names))
    if torch.is_grad_enabled() and x.requires_grad:
        return to_local(x, finished(layout))
    return x.to_local()


def arriving(local: Tensor, leaf: Leaf, find: FindMesh) -> Tensor:
    """The tensor that was sent, from what travelled; writes into it do not reach the buffer."""
    if leaf.flows_back:
        own: Tensor = _Received.apply(local, leaf.local_shape(find), leaf)  # type: ignore[no-untyped-call]
    else:
        own = in_memory(local, leaf)
    if not leaf.axes:
        return own
    layout, mesh = leaf.layout(find), find(leaf.axes)
    made = apply(FromLocal, own, layout, mesh, finished(layout))
    return made if leaf.use is None else apply(Redistribute, made, spec_of(layout, mesh, leaf.use))

"""Functions of torch that its database has not, or not as they are called here: composites and views."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten


@dataclass(frozen=True)
class Extra:
    """A function and the shapes of its tensors."""

    op: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...] = ((6, 8),)
    complex: bool = False


def _square(op: Callable[..., Any]) -> Extra:
    return Extra(op, ((6, 6),))


EXTRAS: dict[str, Extra] = {
    "_unsafe_view": Extra(lambda x: aten._unsafe_view(x, [8, 6] if x.is_contiguous() else list(x.shape))),
    "_reshape_alias": Extra(lambda x: aten._reshape_alias(x, x.shape, x.stride())),
    "_conj and back": Extra(lambda x: x.conj().conj(), complex=True),
    "view_as_real": Extra(torch.view_as_real, complex=True),
    "imag of conj": Extra(lambda x: x.conj().imag, complex=True),
    "view(dtype)": Extra(lambda x: x.view(torch.int32)),
    "fill_diagonal_": Extra(lambda x: x.fill_diagonal_(2)),
    "fill_diagonal_ wrapped": Extra(lambda x: x.fill_diagonal_(2, True), ((9, 3),)),
    "as_strided of its own": Extra(
        lambda x: x.as_strided((2, 3), x.stride(), x.storage_offset() + x.stride(0))
    ),
    "as_strided without offset": Extra(lambda x: x.as_strided((2, 3), x.stride())),
    "as_strided_": Extra(lambda x: x.as_strided_((2, 3), x.stride())),
    "moveaxis": Extra(lambda x: x.moveaxis(0, 1)),
    "swapaxes_": Extra(lambda x: x.swapaxes_(0, 1)),
    "t_": Extra(lambda x: x.t_()),
    "unsqueeze_": Extra(lambda x: x.unsqueeze_(1)),
    "squeeze_": Extra(lambda x: x[:, :1].squeeze_()),
    "view_copy": Extra(lambda x: torch.view_copy(x, (8, 6))),
    "select_scatter": Extra(lambda x: torch.select_scatter(x, x[1] * 2, 0, 3)),
    "cumsum": Extra(lambda x: (x.cumsum(0), x.cumsum(1))),
    "adjoint": Extra(lambda x: x.adjoint(), complex=True),
    "mH": Extra(lambda x: x.mH),
    "T": Extra(lambda x: x.T),
    "expand_as": Extra(lambda x, y: x[:1].expand_as(y), ((6, 8), (6, 8))),
    "view_as": Extra(lambda x, y: x.reshape(8, 6).view_as(y), ((6, 8), (8, 6))),
    "to another dtype and back": Extra(lambda x: (x.to(torch.float64), x.to(x.dtype))),
    "type_as": Extra(lambda x, y: x.type_as(y), ((6, 8), (3,))),
    "detach": Extra(lambda x: x.detach()),
    "data": Extra(lambda x: x.data),
    "unflatten": Extra(lambda x: x.unflatten(1, (2, 4))),
    "unfold": Extra(lambda x: x.unfold(0, 2, 2)),
    "sum_to_size": Extra(lambda x: (x.sum_to_size(6, 8), x.sum_to_size(1, 8))),
    "narrow_copy": Extra(lambda x: x.narrow_copy(0, 1, 3)),
    "broadcast_to": Extra(lambda x: x.broadcast_to(2, 6, 8)),
    "chunk": Extra(lambda x: x.chunk(4)),
    "tensor_split": Extra(lambda x: x.tensor_split(4, 1)),
    "unsafe_split": Extra(lambda x: x.unsafe_split(2)),
    "split_copy": Extra(lambda x: torch.split_copy(x, 2)),
    "contiguous": Extra(lambda x: x.contiguous()),
    "channels_last": Extra(lambda x: x.contiguous(memory_format=torch.channels_last), ((2, 4, 3, 6),)),
    "is_set_to": Extra(lambda x: (x.is_set_to(x), x.is_set_to(x.clone()))),
    "is_same_size": Extra(torch.is_same_size, ((6, 8), (6, 8))),
    "chain_matmul": _square(lambda x: torch.linalg.multi_dot([x, x, x])),
    "flatten_dense_tensors": Extra(lambda x, y: torch._utils._flatten_dense_tensors([x, y]), ((6, 8), (4,))),
    "unflatten_dense_tensors": Extra(
        lambda x, y: torch._utils._unflatten_dense_tensors(x.reshape(-1), [y, y]), ((6, 8), (4, 6))
    ),
    "pad_sequence": Extra(lambda x, y: torch.nn.utils.rnn.pad_sequence([x, y]), ((6, 8), (4, 8))),
    "channel_shuffle": Extra(lambda x: torch.nn.functional.channel_shuffle(x, 2), ((2, 4, 3, 6),)),
    "pixel_shuffle": Extra(lambda x: torch.nn.functional.pixel_shuffle(x, 2), ((2, 4, 3, 6),)),
    "fftshift": Extra(torch.fft.fftshift),
    "inverse": _square(lambda x: torch.linalg.inv(x.square() + x.new_ones(6).diag() * 9)),
    "index": Extra(lambda x: (x[None], x[..., 1], x[1:, ::2], x[:, None, 2:4])),
    "setitem": Extra(lambda x: x[1:, ::2].copy_(x[:5, 1::2])),
    "copy_ of its transpose": _square(lambda x: x.copy_(x.t().clone())),
    "diagonal": Extra(lambda x: x.diagonal(1).fill_(3)),
    "select of select": Extra(lambda x: x[2][3:].view(-1, 1)),
    "split of a flat view": Extra(lambda x: x.reshape(-1).split(5)),
    "nested views": Extra(lambda x: x.t()[1:, 2:].t()[1:]),
    "resolve_conj": Extra(lambda x: (x.resolve_conj(), x.conj().resolve_conj()), complex=True),
    "positive": Extra(torch.positive),
    "clone": Extra(lambda x: x.clone()),
    "empty_like": Extra(torch.zeros_like),
    "new_zeros": Extra(lambda x: x.new_zeros(x.shape)),
    "bilinear of an expand": Extra(
        lambda x: torch.nn.functional.interpolate(x.expand(2, 4, 3, 6), scale_factor=2, mode="bilinear"),
        ((1, 4, 3, 6),),
    ),
}


def arguments_of(extra: Extra) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], dict[str, Any]]:
    """The tensors of a call, the same on every rank."""
    dtype = torch.complex64 if extra.complex else torch.float32
    x, *rest = (torch.arange(1.0, 1 + torch.Size(s).numel()).sin().reshape(s).to(dtype) for s in extra.shapes)
    return x, tuple(rest), {}

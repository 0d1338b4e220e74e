"""Sample calls of the ops that a transformer and its training need, in two profiles of sizes.

All sizes equal shows a rule that only counts; all different and odd shows a label in the wrong place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardwright.testing.simulate import Sample

aten = torch.ops.aten
Sizes = tuple[int, int, int, int]
PROFILES: tuple[Sizes, ...] = ((4, 4, 4, 4), (3, 5, 7, 11))


def randn(*shape: int) -> Tensor:
    """Values of both signs, the same in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(17 * len(shape) + sum(shape)))


def ints(high: int, *shape: int) -> Tensor:
    """Indices below `high`, the same in every run."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high + sum(shape)))


def _attention(b: int, h: int, s: int, e: int) -> tuple[Tensor, Tensor, Tensor]:
    return randn(b, h, s, e), randn(b, h, s + 1, e), randn(b, h, s + 1, e) + 1


def _attention_backward(b: int, h: int, s: int, e: int) -> Sample:
    query, key, value = (x.double() for x in _attention(b, h, s, e))
    out, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    return Sample((randn(b, h, s, e), query, key, value, out, log_sum, 0.0, False))


def _layer_norm_backward(b: int, s: int, e: int) -> Sample:
    x, weight, bias = randn(b, s, e).double(), randn(e).double(), randn(e).double()
    _, mean, rstd = aten.native_layer_norm(x, [e], weight, bias, 1e-5)
    return Sample((randn(b, s, e) + 1, x, [e], mean, rstd, weight, bias, [True, True, True]))


def _adam(a: int, b: int) -> Sample:
    values = randn(a, b)
    lists = [[values], [values + 1], [values * 2], [values.abs()], [], [torch.tensor(3.0)]]
    rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    return Sample(tuple(lists), {**rates, "amsgrad": False, "maximize": False})


# op -> the samples of one profile
SAMPLES: dict[torch._ops.OpOverload, Callable[[int, int, int, int], list[Sample | tuple]]] = {
    aten.add.Tensor: lambda a, b, c, d: [(randn(a, b), randn(b)), (randn(a, b), randn(a, b))],
    aten.sub.Tensor: lambda a, b, c, d: [(randn(a, b), randn(a, 1))],
    aten.mul.Tensor: lambda a, b, c, d: [(randn(a, b), randn(b))],
    aten.div.Tensor: lambda a, b, c, d: [(randn(a, b), randn(b).exp())],
    aten.exp.default: lambda a, b, c, d: [(randn(a, b),)],
    aten.relu.default: lambda a, b, c, d: [(randn(a, b),)],
    aten.clamp.default: lambda a, b, c, d: [(randn(a, b), -0.5, 0.5)],
    aten.ge.Scalar: lambda a, b, c, d: [(randn(a, b), 0.1)],
    aten.where.self: lambda a, b, c, d: [(randn(a, b) > 0, randn(a, b), randn(b))],
    aten.masked_fill.Scalar: lambda a, b, c, d: [(randn(a, b), randn(a, b) > 0, v) for v in (0, -1.5)],
    aten.silu_backward.default: lambda a, b, c, d: [(randn(a, b) + 1, randn(a, b))],
    aten.add_.Tensor: lambda a, b, c, d: [(randn(a, b), randn(b))],
    aten.copy_.default: lambda a, b, c, d: [(randn(a, b), randn(b))],
    aten.mm.default: lambda a, b, c, d: [(randn(a, b), randn(b, c))],
    aten.addmm.default: lambda a, b, c, d: [(randn(c), randn(a, b), randn(b, c))],
    aten.bmm.default: lambda a, b, c, d: [(randn(a, b, c), randn(a, c, d))],
    aten.baddbmm.default: lambda a, b, c, d: [(randn(a, b, d), randn(a, b, c), randn(a, c, d))],
    aten.mv.default: lambda a, b, c, d: [(randn(a, b), randn(b))],
    aten.sum.dim_IntList: lambda a, b, c, d: [(randn(a, b, c), [1]), (randn(a, b, c), [0, -1], True)],
    aten.amax.default: lambda a, b, c, d: [(randn(a, b), [0])],
    aten.any.dim: lambda a, b, c, d: [(randn(a, b) > 0.5, 1)],
    aten.prod.dim_int: lambda a, b, c, d: [(randn(a, b), 0)],
    aten.argmax.default: lambda a, b, c, d: [(randn(a, b), 1)],
    aten.cumsum.default: lambda a, b, c, d: [(randn(a, b), 1)],
    aten.linalg_vector_norm.default: lambda a, b, c, d: [
        (randn(a, b), power, [1]) for power in (2, 1, 3, float("inf"))
    ],
    aten.view.default: lambda a, b, c, d: [(randn(a, b, c), [a * b, c]), (randn(a, b * c), [a, b, c])],
    aten.expand.default: lambda a, b, c, d: [(randn(a, 1, c), [d, a, b, c])],
    aten.permute.default: lambda a, b, c, d: [(randn(a, b, c), [2, 0, 1])],
    aten.transpose.int: lambda a, b, c, d: [(randn(a, b, c), 0, -1)],
    aten.unsqueeze.default: lambda a, b, c, d: [(randn(a, b), 1)],
    aten.slice.Tensor: lambda a, b, c, d: [(randn(a, b), 1, 1, b), (randn(a, b), 0)],
    aten.select.int: lambda a, b, c, d: [(randn(a, b, c), 1, 2)],
    aten.split.Tensor: lambda a, b, c, d: [(randn(a, 3 * b), b, 1)],
    aten.split_with_sizes.default: lambda a, b, c, d: [(randn(a, b), [1, b - 1], 1)],
    aten.unbind.int: lambda a, b, c, d: [(randn(a, b, c), 1)],
    aten.slice_backward.default: lambda a, b, c, d: [(randn(a, b - 1), [a, b], 1, 1, b, 1)],
    aten.select_backward.default: lambda a, b, c, d: [(randn(a, c), [a, b, c], 1, 2)],
    aten._softmax.default: lambda a, b, c, d: [(randn(a, b), -1, False)],
    aten._log_softmax.default: lambda a, b, c, d: [(randn(a, b), 0, False)],
    aten._log_softmax_backward_data.default: lambda a, b, c, d: [
        (randn(a, b) + 1, randn(a, b).log_softmax(1), 1, torch.float64)
    ],
    aten.native_layer_norm.default: lambda a, b, c, d: [(randn(a, b, c), [c], randn(c), randn(c) + 1, 1e-5)],
    aten.native_layer_norm_backward.default: lambda a, b, c, d: [_layer_norm_backward(a, b, c)],
    aten._fused_rms_norm.default: lambda a, b, c, d: [(randn(a, b, c), [c], randn(c), 1e-5)],
    aten.embedding.default: lambda a, b, c, d: [(randn(d, c), ints(d, a, b))],
    aten.embedding_dense_backward.default: lambda a, b, c, d: [(randn(a, b, c), ints(d, a, b), d, -1, False)],
    aten.gather.default: lambda a, b, c, d: [
        (randn(a, b), 1, ints(b, a, c)),
        (randn(a, b), 1, ints(b, a - 1, c)),
    ],
    aten.scatter_add.default: lambda a, b, c, d: [(randn(a, b), 1, ints(b, a, c), randn(a, c))],
    aten.scatter.src: lambda a, b, c, d: [(randn(a, b), 1, ints(b, a, 1), randn(a, 1))],
    aten.index_select.default: lambda a, b, c, d: [(randn(a, b), 1, ints(b, d))],
    aten.index_add.default: lambda a, b, c, d: [(randn(a, b), 1, ints(b, d), randn(a, d))],
    aten.index.Tensor: lambda a, b, c, d: [
        (randn(a, b, c), [None, ints(b, d)]),
        (randn(a, b, c), [ints(a, d), ints(b, d)]),
    ],
    aten.index_put.default: lambda a, b, c, d: [(randn(a, b, c), [None, torch.arange(3)], randn(a, 3, c))],
    aten.sort.default: lambda a, b, c, d: [(randn(a, b), 1)],
    aten.topk.default: lambda a, b, c, d: [(randn(a, b), 2, 1)],
    aten.cat.default: lambda a, b, c, d: [([randn(a, b), randn(a, c)], 1)],
    aten.stack.default: lambda a, b, c, d: [([randn(a, b), randn(a, b) + 1], 1)],
    aten._scaled_dot_product_flash_attention_for_cpu.default: lambda a, b, c, d: [
        _attention(a, b, c, d),
        Sample((randn(a, 2 * b, c, d), randn(a, 2 * b, c, d), randn(a, 2 * b, c, d) + 1, 0.0, True)),
    ],
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: lambda a, b, c, d: [
        _attention_backward(a, b, c, d)
    ],
    aten._foreach_mul_.List: lambda a, b, c, d: [([randn(a, b)], [randn(a, b) + 1])],
    aten._foreach_norm.Scalar: lambda a, b, c, d: [([randn(a, b)], 2)],
    aten._fused_adamw_.default: lambda a, b, c, d: [_adam(a, b)],
    aten.tril.default: lambda a, b, c, d: [(randn(a, b, c),)],
    aten.constant_pad_nd.default: lambda a, b, c, d: [(randn(a, b), [1, 2], 0.0)],
    aten.zeros_like.default: lambda a, b, c, d: [(randn(a, b),)],
    aten.new_full.default: lambda a, b, c, d: [(randn(a, b), [a, b], 2.0), (randn(a, b), [c], 2.0)],
    aten.convolution.default: lambda a, b, c, d: [
        (randn(a, b, 6, 6), randn(c, b, 3, 3), randn(c), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        (randn(a, 2 * b, 5), randn(c * b, 2, 3), None, [1], [0], [1], False, [0], b),
        (randn(a, 2 * b, 5), randn(2 * b, c, 3), randn(c * b), [2], [1], [1], True, [1], b),
    ],
    aten.convolution_backward.default: lambda a, b, c, d: [
        _convolution_backward(randn(a, b, 5), randn(c, b, 3), False, 1),
        _convolution_backward(randn(a, 2 * b, 5), randn(c * b, 2, 3), False, b),
        _convolution_backward(randn(a, 2 * b, 5), randn(2 * b, c, 3), True, b),
    ],
}


def _convolution_backward(image, weight, transposed, groups):
    rest = ([1], [1], [1], transposed, [0], groups)
    out = aten.convolution.default(image, weight, None, *rest)
    return (torch.cos(out), image, weight, [out.shape[1]], *rest, [True, True, True])


def samples_of(op: torch._ops.OpOverload) -> list[Sample | tuple]:
    """The samples of an op in both profiles."""
    return [sample for profile in PROFILES for sample in SAMPLES[op](*profile)]

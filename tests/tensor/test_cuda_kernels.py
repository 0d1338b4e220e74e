"""What a rank calls where CUDA's kernels ask for more than the CPU's, or give less: on stand-ins of them."""

from __future__ import annotations

import pytest
import torch

from shardwright.tensor.dispatch.kernels import kernel_of

_aten = torch.ops.aten
EFFICIENT = _aten._scaled_dot_product_efficient_attention.default
EFFICIENT_BACKWARD = _aten._scaled_dot_product_efficient_attention_backward.default


class _Kernel:
    """Notes its arguments, as an op of that schema."""

    def __init__(self, op, answer=None):
        self._schema, self._answer = op._schema, answer

    def __call__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
        return self._answer


@pytest.mark.parametrize(("op", "place"), [(EFFICIENT, 3), (EFFICIENT_BACKWARD, 4)])
@pytest.mark.parametrize(
    "bias",
    [
        torch.randn(2, 4, 6, 6),
        torch.randn(1, 4, 6, 6).expand(2, 4, 6, 6),
        torch.randn(2, 4, 6, 16)[..., :6],
        torch.randn(2, 4, 6, 12).transpose(2, 3),
    ],
    ids=["contiguous", "expanded", "aligned", "transposed"],
)
def test_rows_of_a_bias_begin_where_the_kernel_wants_them(op, place, bias):
    kernel = _Kernel(op)
    rest = [object() for _ in range(place)]
    kernel_of(kernel, {torch.float32})(*rest, bias, True, scale=0.5)
    given = kernel.args[place]
    assert kernel.args[:place] == tuple(rest)
    assert kernel.args[place + 1 :] == (True,)
    assert kernel.kwargs == {"scale": 0.5}
    assert torch.equal(given, bias)
    assert all(step % 16 == 0 for step in given.stride()[:-1])
    assert (given is bias) is all(step % 16 == 0 for step in bias.stride()[:-1])


def test_without_a_bias_the_kernel_is_called_as_it_is():
    kernel = _Kernel(EFFICIENT)
    kernel_of(kernel, {torch.float32})(1, 2, 3, None, True)
    assert kernel.args == (1, 2, 3, None, True)


@pytest.mark.parametrize("shape", [(0,), (2, 3)])
def test_a_log_sigmoid_has_its_buffer(shape):
    out, buffer = torch.randn(2, 3), torch.randn(shape)
    found = kernel_of(_Kernel(_aten.log_sigmoid_forward.default, (out, buffer)), {torch.float32})(out)
    assert found[0] is out
    assert found[1].shape == out.shape
    assert (found[1] is buffer) is (shape == (2, 3))

"""Convolutions and pooling: batch and channels may be cut, space is whole."""

from __future__ import annotations

from shardwright.rules.call import Call
from shardwright.rules.catalog.labels import join
from shardwright.rules.formula import Formula, formula
from shardwright.rules.rule import register_rule


def _space(call: Call) -> list[str]:
    weight: tuple[int, ...] = call.arg("weight").shape
    return ["_"] * (len(weight) - 2)


def _batched(call: Call) -> bool:
    return len(call.arg("input").shape) == len(call.arg("weight").shape)


@register_rule("aten::convolution", "aten::_convolution")
def convolution(call: Call) -> Formula | None:
    """Output channels follow the weight; input channels are contracted. Groups keep channels whole."""
    if not _batched(call):
        return None
    space = _space(call)
    if call.arg("groups") != 1:
        image, weight, bias, out = ["n", "_", *space], ["_", "_", *space], ["_"], ["n", "_", *space]
    else:
        channels = ["i", "o"] if call.arg("transposed") else ["o", "i"]
        image, weight, bias, out = ["n", "i", *space], [*channels, *space], ["o"], ["n", "o", *space]
    text = join([image, weight, bias], [out])
    return formula(text, reduce="sum", hom=("input+bias: sum->sum", "weight+bias: sum->sum"))


@register_rule("aten::convolution_backward")
def convolution_backward(call: Call) -> Formula | None:
    """Batch cut: the gradients of weight and bias are sums. Channels stay whole here."""
    if not _batched(call):
        return None
    space = _space(call)
    image, weight = ["n", "_", *space], ["_", "_", *space]
    text = join([image, image, weight], [image, weight, ["_"]])
    return formula(text, reduce=(None, "sum", "sum"), hom="grad_output: sum->sum")


_POOLS = {
    "max_pool2d_with_indices": 2,
    "max_pool3d_with_indices": 3,
    "avg_pool2d": 2,
    "avg_pool3d": 3,
    "_adaptive_avg_pool2d": 2,
    "_adaptive_avg_pool3d": 3,
    "adaptive_max_pool2d": 2,
    "upsample_nearest1d": 1,
    "upsample_nearest2d": 2,
    "upsample_bilinear2d": 2,
    "upsample_bicubic2d": 2,
}


@register_rule(*(f"aten::{name}" for name in _POOLS), *(f"aten::{name}_backward" for name in _POOLS))
def pooling(call: Call) -> Formula | None:
    """Each channel of each image on its own."""
    name = call.op._schema.name.partition("::")[2].removesuffix("_backward")
    rank = len(call.operands[0].shape)
    outer = ["n", "c"][2 - (rank - _POOLS[name]) :]
    if rank - _POOLS[name] not in {1, 2} or "input_size" in call.bound:
        return None
    items = [*outer, *["_"] * _POOLS[name]]
    count = len([operand for operand in call.flat_operands if not operand.out])
    return formula(join([items] * count, [items] * len(call.results)))

"""Convolutions and pooling: batch, channels and groups may be cut, space is whole."""

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


def _channels(call: Call) -> tuple[str, str, str, str]:
    """The dims of input channels, of the weight's first and second dim, and of output channels.

    Groups are cut as a whole: a rank that holds some of them is a convolution with fewer groups.
    """
    groups, transposed = call.arg("groups"), call.arg("transposed")
    if groups == 1:
        return ("i", "i", "o", "o") if transposed else ("i", "o", "i", "o")
    first, second = call.arg("weight").shape[:2]
    grouped = f"(g {first // groups})"
    if transposed:
        return grouped, grouped, "_", f"(g {second})"
    return f"(g {second})", grouped, "_", grouped


@register_rule("aten::convolution", "aten::_convolution", "aten::convolution_overrideable")
def convolution(call: Call) -> Formula | None:
    """Batch, output channels, groups; input channels are contracted: cut, every rank has a term."""
    if not _batched(call):
        return None
    space, (i, first, second, o) = _space(call), _channels(call)
    text = join([["n", i, *space], [first, second, *space], [o]], [["n", o, *space]])
    return formula(
        text,
        reduce="sum",
        hom=("input+bias: sum->sum", "weight+bias: sum->sum"),
        ints={} if call.arg("groups") == 1 else {"groups": "g"},
    )


@register_rule("aten::convolution_backward", "aten::convolution_backward_overrideable")
def convolution_backward(call: Call) -> Formula | None:
    """Each gradient is a sum over what it lacks: batch, output or input channels; the bias' sees no input."""
    if not _batched(call):
        return None
    space, (i, first, second, o) = _space(call), _channels(call)
    made, image, weight = ["n", o, *space], ["n", i, *space], [first, second, *space]
    given = call.bound.get("bias_sizes")
    has_bias = isinstance(given, tuple | list) and tuple(given) == (call.arg("grad_output").shape[1],)
    return formula(
        join([made, image, weight], [image, weight, [o]]),
        reduce=("sum", "sum", "sum"),
        hom="grad_output: sum->sum",
        depends={2: ("grad_output",)},
        ints={} if call.arg("groups") == 1 else {"groups": "g"},
        shapes={"bias_sizes": o} if has_bias else {},
    )


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
    facts = ("grad_output: sum->sum",) if "grad_output" in call.bound else ()
    return formula(join([items] * count, [items] * len(call.results)), hom=facts)

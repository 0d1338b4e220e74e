"""Images: padding, interpolation, sampling, patches. Space is whole, all dims before it may be cut."""

from __future__ import annotations

from math import prod

import torch

from shardwright.compat import suggest_memory_format
from shardwright.rules.call import Call
from shardwright.rules.formula import Formula, formula
from shardwright.rules.registry import rewrite
from shardwright.rules.rule import register_rule, rule

_PADS = {f"{kind}_pad{dims}d": dims for kind in ("reflection", "replication") for dims in (1, 2, 3)}
_INTERPOLATIONS = {
    "upsample_linear1d": 1,
    "upsample_trilinear3d": 3,
    "upsample_nearest3d": 3,
    "_upsample_nearest_exact1d": 1,
    "_upsample_nearest_exact2d": 2,
    "_upsample_nearest_exact3d": 3,
    "_upsample_bilinear2d_aa": 2,
    "_upsample_bicubic2d_aa": 2,
}
_INTERPOLATIONS_BACK = {
    **_INTERPOLATIONS,
    "upsample_nearest1d": 1,
    "upsample_nearest2d": 2,
    "upsample_bilinear2d": 2,
    "upsample_bicubic2d": 2,
}


def _name(call: Call) -> str:
    return str(call.op._schema.name).partition("::")[2].removesuffix("_backward")


def _space(dims: int) -> str:
    return " ".join(["...", *["_"] * dims])


@register_rule(*(f"aten::{name}" for name in {**_PADS, **_INTERPOLATIONS}))
def widened(call: Call) -> Formula:
    """Each channel of each image on its own; every new value is a linear combination of old ones."""
    space = _space({**_PADS, **_INTERPOLATIONS}[_name(call)])
    return formula(f"{space} -> {space}", hom="self: sum->sum")


@register_rule(*(f"aten::{name}_backward" for name in _PADS))
def padding_backward(call: Call) -> Formula:
    """Of the image only the shape is read."""
    space = _space(_PADS[_name(call)])
    return formula(f"{space}, ~{space} -> {space}", hom="grad_output: sum->sum")


@register_rule(*(f"aten::{name}_backward" for name in _INTERPOLATIONS_BACK))
def interpolation_backward(call: Call) -> Formula:
    """The shape of the image is an argument."""
    space = _space(_INTERPOLATIONS_BACK[_name(call)])
    return formula(f"{space} -> {space}", hom="grad_output: sum->sum", shapes={"input_size": "@0"})


rule("aten::grid_sampler_2d", "n c _ _, n a b _ -> n c a b", hom="input: sum->sum")
rule("aten::grid_sampler_3d", "n c _ _ _, n a b d _ -> n c a b d", hom="input: sum->sum")


@register_rule("aten::grid_sampler_2d_backward", "aten::grid_sampler_3d_backward")
def sampling_backward(call: Call) -> Formula | None:
    """The image gathers from all places, the places from all channels."""
    if None in call.results:
        return None
    space, places = ("_ _", "a b") if "2d" in _name(call) else ("_ _ _", "a b d")
    image, grid = f"n c {space}", f"n {places} _"
    text = f"n c {places}, {image}, {grid} -> {image}, {grid}"
    return formula(text, reduce="sum", hom="grad_output: sum->sum")


_UNPOOLS = {"max_unpool2d": 2, "max_unpool3d": 3}
_POOLS = {"adaptive_max_pool3d": 3, "fractional_max_pool2d": 2, "fractional_max_pool3d": 3}


@register_rule(*(f"aten::{name}" for name in _UNPOOLS))
def unpooling(call: Call) -> Formula:
    """Indices count within one channel."""
    space = _space(_UNPOOLS[_name(call)])
    return formula(f"{space}, {space} -> {space}")


@register_rule("aten::adaptive_max_pool3d")
def adaptive_pooling(call: Call) -> Formula:  # noqa: ARG001  every call alike
    """Maxima and where they stand within their channel."""
    return formula("... _ _ _ -> ... _ _ _, ... _ _ _")


@register_rule(*(f"aten::{name}_backward" for name in _POOLS))
def pooling_backward(call: Call) -> Formula:
    """Each gradient goes where its maximum stood."""
    space = _space(_POOLS[_name(call)])
    return formula(f"{space}, ~{space}, {space} -> {space}", hom="grad_output: sum->sum")


@register_rule("aten::fractional_max_pool2d", "aten::fractional_max_pool3d")
def fractional_pooling(call: Call) -> Formula:
    """The places come as an operand, for each image and channel."""
    dims = _POOLS[_name(call)]
    space = " ".join(["_"] * dims)
    if len(call.arg("self").shape) == dims + 1:
        return formula(f"c {space}, 1 c _ -> c {space}, c {space}")
    return formula(f"n c {space}, n c _ -> n c {space}, n c {space}")


@register_rule("aten::im2col")
def patches(call: Call) -> Formula:
    """Patches of a channel follow one another, channel by channel."""
    batch, count = _batch(call, 3), prod(call.arg("kernel_size"))
    return formula(f"{batch} c _ _ -> {batch} (c {count}) _", hom="self: sum->sum")


@register_rule("aten::col2im")
def image_of_patches(call: Call) -> Formula:
    """The sum of the patches of a channel."""
    batch, count = _batch(call, 2), prod(call.arg("kernel_size"))
    return formula(f"{batch} (c {count}) _ -> {batch} c _ _", hom="self: sum->sum")


@rewrite("aten::channel_shuffle")
def channel_shuffle(_op: object, x: torch.Tensor, groups: int) -> torch.Tensor:
    """The channels of each group in turn, in the memory format of the operand."""
    torch.channel_shuffle(torch.empty(x.shape, device="meta"), groups)  # raises what one device does
    grouped: torch.Tensor = x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
    return grouped.contiguous(memory_format=suggest_memory_format(x))


def _batch(call: Call, single: int) -> str:
    return "n" if len(call.arg("self").shape) > single else ""

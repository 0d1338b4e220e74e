"""Elementwise ops: any partition of the elements will do; what they keep of pending values is listed.

Random ops are not among them: a part's own draw is not the part of the whole draw.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardwright.rules.call import Call, TensorInfo
from shardwright.rules.formula import Formula, formula
from shardwright.rules.rule import register_rule, rule

_TEXT = "*... -> ..."

# x + y, x - y and the like: linear in both together; monotone in the first.
_ADDS = ("self+other: sum->sum", "self: avg->avg, max->max, min->min")
_MONOTONE = ("self: max->max, min->min",)
_LINEAR = ("self: sum->sum",)
_SAME = ("self: *",)

# No fact about pending values: parts of a sum may leave the domain, or the op is not linear in anything.
NO_FACT = """
    __and__ __lshift__ __or__ __rshift__ __xor__ _prelu_kernel abs acos acosh angle asin atan2 atanh
    bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor celu complex
    copysign cos cosh deg2rad digamma elu eq erfc erfinv floor_divide fmax fmin fmod frac gcd ge gelu gt
    hardshrink hardsigmoid hardswish heaviside hypot i0 igamma igammac isfinite isinf isnan isneginf
    isposinf lcm ldexp le leaky_relu lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and
    logical_not logical_or logical_xor logit lt mish mvlgamma nan_to_num ne nextafter polar polygamma pow
    rad2deg reciprocal remainder rsqrt sgn sign signbit silu sin sinc softplus softshrink special_airy_ai
    special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_entr special_erfcx
    special_i0e special_i1 special_i1e special_log_ndtr special_modified_bessel_i0
    special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
    special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0
    special_xlog1py special_zeta sqrt tan threshold xlogy
    special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
    special_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he
    special_laguerre_polynomial_l special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t
    special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
    special_shifted_chebyshev_polynomial_w
"""
# Increasing on all of the reals and keeping nan, so the largest part has the largest value. Not here: what is
# monotone only for some parameters (leaky_relu, threshold), what swallows nan (sign, comparisons).
MONOTONE = """
    asinh atan ceil clamp clamp_max clamp_min erf exp exp2 expm1 floor hardtanh relu round sigmoid sinh
    tanh trunc
"""
LINEAR = "_conj _conj_physical conj_physical"
# The result holds the values unchanged.
IDENTITY = "alias clone detach lift lift_fresh"
# name -> facts
FACTS: dict[str, tuple[str, ...]] = {
    "add": _ADDS,
    "sub": _ADDS,
    "rsub": ("self+other: sum->sum", "self: avg->avg"),
    "mul": ("self: sum->sum", "other: sum->sum", "self+other: product->product"),
    "neg": ("self: sum->sum, max->min, min->max",),
    "maximum": ("self+other: max->max", "self: max->max", "other: max->max"),
    "minimum": ("self+other: min->min", "self: min->min", "other: min->min"),
    "where": ("self+other: *",),
    "addcmul": ("self+tensor1: sum->sum", "self+tensor2: sum->sum"),
    "addcdiv": ("self+tensor1: sum->sum",),
    "lerp": ("self+end: sum->sum",),
    "zero": ("self: *",),
}
# Gradients are linear in the gradient that comes in.
BACKWARDS = """
    elu_backward gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward
    hardtanh_backward leaky_relu_backward log_sigmoid_backward logit_backward mish_backward
    native_dropout_backward sigmoid_backward silu_backward softplus_backward softshrink_backward
    tanh_backward threshold_backward
"""


def _rows(names: str | Iterable[str], facts: tuple[str, ...]) -> None:
    for name in names.split() if isinstance(names, str) else names:
        rule(f"aten::{name}", _TEXT, hom=facts, elementwise=True)


_rows(NO_FACT, ())
_rows(MONOTONE, _MONOTONE)
_rows(LINEAR, _LINEAR)
_rows(IDENTITY, _SAME)
for _name, _facts in FACTS.items():
    _rows([_name], _facts)
_rows(BACKWARDS, ("grad_output: sum->sum",))
rule("aten::_prelu_kernel_backward", "*... -> ..., ...", hom="grad_output: sum->sum", elementwise=True)
rule("aten::log_sigmoid_forward", "*... -> ..., ...", elementwise=True)
rule("aten::frexp", "*... -> ..., ...", elementwise=True)
rule("aten::fake_quantize_per_tensor_affine_cachemask.default", "... -> ..., ...", elementwise=True)
rule("aten::_neg_view", _TEXT, hom="self: sum->sum, max->min, min->max", elementwise=True)
rule("aten::isin.Tensor_Tensor", "..., - -> ...")
rule("aten::bucketize.Tensor", "..., - -> ...")


@register_rule("aten::div", any_size=True)
def divide(call: Call) -> Formula:
    """Linear in the dividend, unless the quotient is rounded."""
    rounded = call.bound.get("rounding_mode") is not None
    facts = () if rounded else ("self: sum->sum", "self+other: product->product")
    return formula(_TEXT, hom=facts, elementwise=True)


@register_rule("aten::masked_fill", any_size=True)
def masked_fill(call: Call) -> Formula:
    """Linear with the value (a tensor, or zero); a constant leaves extremes what they are."""
    value = call.arg("value")
    if isinstance(value, TensorInfo):
        return formula(_TEXT, hom="self+value: *", elementwise=True)
    facts = ("self: *",) if value == 0 else ("self: max->max, min->min, avg->avg",)
    return formula(_TEXT, hom=facts, elementwise=True)


@register_rule("aten::_to_copy", any_size=True)
def cast(call: Call) -> Formula:
    """A cast that loses digits is not linear; any cast between real numbers keeps the order."""
    return formula(_TEXT, hom=_cast_facts("self", call.arg("self").dtype, _dtype_of(call)), elementwise=True)


@register_rule("aten::copy", any_size=True)
def copy(call: Call) -> Formula:
    """The old values do not matter, so old and new may both be read as pending."""
    facts = _cast_facts("self+src", call.arg("src").dtype, call.arg("self").dtype)
    return formula(_TEXT, hom=facts, elementwise=True)


@register_rule("aten::fill", any_size=True)
def fill(call: Call) -> Formula:
    """The old values do not matter. A maximum, minimum or average of equal values is the value."""
    facts = ["self: max->max, min->min, avg->avg"]
    if call.bound.get("value") == 0:
        facts.append("self: *")
    return formula(_TEXT, hom=facts, elementwise=True)


def _dtype_of(call: Call) -> torch.dtype:
    result = call.results[0]
    source: torch.dtype = call.arg("self").dtype
    return source if result is None else result.dtype


def _cast_facts(args: str, source: torch.dtype, target: torch.dtype) -> tuple[str, ...]:
    if source == target:
        return (f"{args}: *",)
    if source.is_complex or target.is_complex or torch.bool in {source, target}:
        return ()
    order = (f"{args}: max->max, min->min",) if target.is_floating_point else ()
    return (f"{args}: sum->sum", *order) if _widens(source, target) else order


def _widens(source: torch.dtype, target: torch.dtype) -> bool:
    if source.is_floating_point and target.is_floating_point:
        low, high = torch.finfo(source), torch.finfo(target)
        return high.eps <= low.eps and high.max >= low.max
    if source.is_floating_point or target.is_floating_point:
        return False
    inner, outer = torch.iinfo(source), torch.iinfo(target)
    return outer.max >= inner.max and outer.min <= inner.min

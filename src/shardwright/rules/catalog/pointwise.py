"""Elementwise ops: any partition of the elements will do; what they keep of pending values is listed.

Random ops are not among them: a part's own draw is not the part of the whole draw.
"""

from __future__ import annotations

from cmath import isfinite
from collections.abc import Iterable

from shardwright.rules.call import Call, TensorInfo
from shardwright.rules.formula import Formula, formula
from shardwright.rules.rule import register_rule, rule

_TEXT = "*... -> ..."

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
    "rsub": ("self+other: sum->sum", "self: avg->avg"),
    "maximum": ("self+other: max->max", "self: max->max", "other: max->max"),
    "minimum": ("self+other: min->min", "self: min->min", "other: min->min"),
    "where": ("self+other: *",),
    "addcmul": ("self+tensor1: sum->sum", "self+tensor2: sum->sum"),
    "addcdiv": ("self+tensor1: sum->sum",),
    "lerp": ("self+end: sum->sum",),
    "zero": ("self: *",),
    # Casts: which parts may be converted in place of the value is a matter of the reduction, not of the op.
    "_to_copy": ("self: *",),
    # The old values do not matter, so old and new may both be read as pending.
    "copy": ("self+src: each",),
}
# Gradients are linear in the gradient that comes in.
BACKWARDS = """
    elu_backward gelu_backward hardsigmoid_backward hardswish_backward
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
_rows(IDENTITY, ("self: each",))
for _name, _facts in FACTS.items():
    _rows([_name], _facts)
_rows(BACKWARDS, ("grad_output: sum->sum",))
_rows(["hardshrink_backward"], ("grad_out: sum->sum",))
rule("aten::_prelu_kernel_backward", "*... -> ..., ...", hom="grad_output: sum->sum", elementwise=True)
rule("aten::log_sigmoid_forward", "*... -> ..., ...", elementwise=True)
rule("aten::frexp", "*... -> ..., ...", elementwise=True)
rule("aten::fake_quantize_per_tensor_affine_cachemask.default", "... -> ..., ...", elementwise=True)
rule("aten::isin.Tensor_Tensor", "..., - -> ...")


@register_rule("aten::add", "aten::sub", any_size=True)
def add(call: Call) -> Formula:
    """Linear in both together, monotone in the first. Integers wrap around: the largest may become small."""
    order = ("self: max->max, min->min",) if _is_inexact(call) else ()
    return formula(_TEXT, hom=("self+other: sum->sum", "self: avg->avg", *order), elementwise=True)


@register_rule("aten::neg", "aten::_neg_view", any_size=True)
def negative(call: Call) -> Formula:
    """The largest becomes the smallest, but for integers: the least of them is its own negative."""
    order = ("self: max->min, min->max",) if _is_inexact(call) else ()
    return formula(_TEXT, hom=("self: sum->sum", *order), elementwise=True)


def _is_inexact(call: Call) -> bool:
    """Whether the op makes floating-point numbers."""
    made = next((info for info in call.results if info is not None), call.operands[0])
    return made.dtype.is_floating_point or made.dtype.is_complex


@register_rule("aten::div", any_size=True)
def divide(call: Call) -> Formula:
    """Linear in the dividend, unless the quotient is rounded, or terms become infinite with either sign."""
    by = call.bound.get("other")
    rounded = call.bound.get("rounding_mode") is not None
    facts = (
        () if rounded or _is_infinite(by) or by == 0 else ("self: sum->sum", "self+other: product->product")
    )
    return formula(_TEXT, hom=facts, elementwise=True)


@register_rule("aten::mul", any_size=True)
def multiply(call: Call) -> Formula:
    """Linear in each factor, unless terms become infinite with either sign."""
    facts = ("self: sum->sum", "other: sum->sum", "self+other: product->product")
    return formula(_TEXT, hom=() if _is_infinite(call.bound.get("other")) else facts, elementwise=True)


def _is_infinite(number: object) -> bool:
    """A number, no tensor, that is infinite or not a number."""
    return isinstance(number, float | complex) and not isfinite(number)


@register_rule("aten::masked_fill", any_size=True)
def masked_fill(call: Call) -> Formula:
    """Linear with the value (a tensor, or zero); a constant leaves extremes what they are."""
    value = call.arg("value")
    if isinstance(value, TensorInfo):
        return formula(_TEXT, hom="self+value: *", elementwise=True)
    facts = ("self: *",) if value == 0 else ("self: max->max, min->min, avg->avg",)
    return formula(_TEXT, hom=facts, elementwise=True)


@register_rule("aten::fill", any_size=True)
def fill(call: Call) -> Formula:
    """The old values do not matter. A maximum, minimum or average of equal values is the value."""
    facts = ["self: max->max, min->min, avg->avg"]
    if call.bound.get("value") == 0:
        facts.append("self: *")
    return formula(_TEXT, hom=facts, elementwise=True)


# Steps of optimizers: parameter, gradient and state; counters and rates are scalars.
for _name in ("adam", "adamw", "sgd", "adagrad"):
    rule(f"aten::_fused_{_name}_", "*... ->", elementwise=True)

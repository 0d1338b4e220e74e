"""Ops that take their operands element by element, in every form that torch has of them."""

from __future__ import annotations

from typing import Any

import torch

from tests.fuzz.families.forms import draw_form, formed, into, target
from tests.fuzz.program import Ref
from tests.fuzz.scope import Nope, Scope, kind_of

_UNARY = {
    "f": ("neg", "abs", "exp", "sin", "cos", "tanh", "sigmoid", "relu", "square", "sign", "floor", "erf",
          "sqrt", "asinh", "tan", "cosh", "exp2", "log2", "log10", "deg2rad", "erfc", "sinc", "isinf", "fix",
          "positive", "reciprocal", "log", "rsqrt", "expm1", "log1p", "trunc", "round", "ceil", "frac",
          "isfinite",
          "isnan", "logical_not", "signbit", "negative", "atan", "sinh", "nan_to_num", "sgn", "acos",
          "lgamma"),
    "c": ("neg", "abs", "exp", "sin", "tanh", "square", "conj_physical", "angle", "reciprocal", "sgn", "conj",
          "resolve_conj", "sqrt", "isfinite"),
    "i": ("neg", "abs", "square", "sign", "bitwise_not", "positive", "relu", "float", "logical_not",
          "sqrt", "sin"),
    "b": ("logical_not", "bitwise_not", "float", "abs"),
}  # fmt: skip
_ACTIVATIONS = ("silu", "gelu", "softplus", "elu", "leaky_relu", "hardtanh", "mish", "relu6",
    "logsigmoid", "selu",
                "hardswish", "softsign", "tanhshrink")  # fmt: skip
_BINARY = {
    "f": ("add", "sub", "mul", "div", "maximum", "minimum", "fmod", "remainder", "atan2", "hypot",
          "copysign", "fmax",
          "true_divide", "floor_divide", "xlogy", "logaddexp", "fmin", "heaviside", "nextafter",
          "float_power", "logaddexp2", "rsub", "logical_and", "eq", "gt"),
    "c": ("add", "sub", "mul", "div", "eq", "rsub"),
    "i": ("add", "sub", "mul", "maximum", "minimum", "bitwise_and", "bitwise_or", "bitwise_xor", "fmax",
          "div", "gcd", "lcm", "floor_divide", "remainder", "bitwise_left_shift", "ne", "rsub"),
    "b": ("add", "mul", "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or",
          "bitwise_xor",
          "maximum", "minimum"),
}  # fmt: skip
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
_LISTS = ("neg", "abs", "exp", "sqrt", "sin", "square", "sigmoid", "tanh", "sign", "reciprocal", "floor",
    "zero",
          "erf", "log1p", "rsqrt")  # fmt: skip
_LISTS_OF_TWO = ("add", "sub", "mul", "div", "maximum", "minimum", "copy")


def unary(s: Scope) -> None:
    """One op on one tensor."""
    kind = s.rng.choices("fcib", (6, 1, 1, 0.5))[0]
    name = s.rng.choice(_UNARY[kind])
    form = draw_form(s, name)
    if form == "list":
        return _list_of_one(s, name, kind)
    formed(s, name, target(s, form, kind), form=form)
    return None


def activation(s: Scope) -> None:
    """A function of `F`, sometimes in place."""
    name = s.rng.choice(_ACTIVATIONS)
    in_place = s.chance(0.2) and name in {
        "silu",
        "elu",
        "leaky_relu",
        "hardtanh",
        "relu6",
        "mish",
        "hardswish",
    }
    x = s.pick("f", written=in_place)
    s.do(f"F.{name}", x, form="in place" if in_place else "plain", **({"inplace": True} if in_place else {}))


def binary(s: Scope) -> None:
    """One op on two tensors, or a tensor and a number, or what a program read from one."""
    kind = s.rng.choices("fcib", (6, 1, 1.5, 0.5))[0]
    name = s.rng.choice(_BINARY[kind])
    form = draw_form(s, name)
    if form == "list":
        return _list_of_two(s, name, kind)
    x = target(s, form, kind)
    kwargs: dict[str, Any] = (
        {"alpha": s.rng.choice((2, -1, 3))} if name in {"add", "sub"} and s.chance(0.2) else {}
    )
    formed(s, name, x, _other(s, x, kind), form=form, **kwargs)
    return None


def _other(s: Scope, x: Ref, kind: str) -> Any:
    roll = s.rng.random()
    if roll < 0.2:
        return {"f": s.rng.choice((2, 0.5, -1.5, 3)), "c": s.rng.choice((2, 0.5 + 1j)),
        "i": s.rng.randint(-3, 3),
                "b": True}[kind]  # fmt: skip
    if roll < 0.27:
        numbers = [n for n, v in s.env.items() if isinstance(v, int | float) and not isinstance(v, bool)]
        if numbers:
            return Ref(s.rng.choice(numbers))
    if roll < 0.4:  # of another type
        return s.pick("fib", where=lambda y: _broadcasts(y, s[x]))
    return s.broadcast(s[x])


def _broadcasts(y: torch.Tensor, x: torch.Tensor) -> bool:
    try:
        return torch.broadcast_shapes(x.shape, y.shape).numel() <= 200
    except RuntimeError:
        return False


def compare(s: Scope) -> None:
    """A comparison; its result is bool."""
    name = s.rng.choice(_COMPARE)
    form = s.rng.choice(("plain", "method", "out="))
    x = s.pick("fi" if name not in {"eq", "ne"} else "ficb")
    other = s.rng.choice((0, 1, 0.25)) if s.chance(0.5) else s.broadcast(s[x])
    formed(s, name, x, other, form=form)


def ternary(s: Scope) -> None:
    """where, lerp, addcmul, addcdiv, clamp, masked_fill."""
    name = s.rng.choice(
        ("where", "lerp", "addcmul", "addcdiv", "clamp", "clamp_min", "masked_fill", "nan_to_num")
    )
    form = draw_form(s, name)
    form = "method" if form == "list" else form
    if name == "where":
        x = s.pick("fcib")
        condition = mask_for(s, s[x], broadcast=True)
        other = s.broadcast(s[x]) if s.chance(0.6) else s.rng.choice((0, 1, 2.5))
        if form == "out=":
            return _ignore(into(s, "torch.where", condition, x, other))
        return _ignore(s.do("torch.where", condition, x, other))
    kinds = "f" if name in {"lerp", "addcdiv", "nan_to_num"} else "fi" if name.startswith("clamp") else "fic"
    x = target(s, form, kinds)
    if name.startswith("clamp"):
        low, high = s.rng.choice((-1, 0, 0.5)), s.rng.choice((1, 2))
        return _ignore(formed(s, name, x, low, *((high,) if name == "clamp" else ()), form=form))
    if name == "masked_fill":
        return _ignore(
            formed(s, name, x, mask_for(s, s[x], broadcast=True), s.rng.choice((0, 1.5, -2)), form=form)
        )
    if name == "nan_to_num":
        return _ignore(formed(s, name, x, form=form))
    if name == "lerp":
        weight = s.rng.choice((0.25, 0.75)) if s.chance(0.5) else s.broadcast(s[x])
        return _ignore(formed(s, name, x, s.broadcast(s[x]), weight, form=form))
    kwargs = {"value": s.rng.choice((2, -1))} if s.chance(0.5) else {}
    return _ignore(formed(s, name, x, s.broadcast(s[x]), s.broadcast(s[x]), form=form, **kwargs))


def _ignore(_: object) -> None:
    return None


def mask_for(s: Scope, x: torch.Tensor, *, broadcast: bool = False) -> Ref:
    """A bool variable of x's shape (or one that broadcasts to it)."""
    shape = tuple(x.shape)
    if s.chance(0.3):
        try:
            return s.pick("b", where=lambda y: tuple(y.shape) == shape)
        except Nope:
            pass
    if broadcast and shape and s.chance(0.3):
        shape = shape[s.rng.randint(0, len(shape)) :]
    return s.leaf(shape, torch.bool)


def lists(s: Scope) -> None:
    """A `_foreach_` op."""
    (_list_of_one if s.chance(0.4) else _list_of_two if s.chance(0.7) else _list_of_three)(s)


def _members(s: Scope, kind: str, written: bool) -> list[Ref]:
    found = [s.pick(kind, written=written) for _ in range(s.rng.randint(1, 3))]
    if written and len({r.name for r in found}) < len(found):
        raise Nope
    return found


def _list_call(s: Scope, name: str, written: bool, xs: list[Ref], *rest: Any, **kwargs: Any) -> None:
    form = "list, in place" if written else "list"
    call = f"torch._foreach_{name}{'_' if written else ''}"
    s.do(call, xs, *rest, form=form, result=not written, **kwargs)


def _list_of_one(s: Scope, name: str = "", kind: str = "f") -> None:
    name = name if name and hasattr(torch, f"_foreach_{name}") else s.rng.choice(_LISTS)
    written = s.chance(0.5) or name == "zero"
    _list_call(s, name, written, _members(s, kind, written))


def _list_of_two(s: Scope, name: str = "", kind: str = "f") -> None:
    name = name if name and hasattr(torch, f"_foreach_{name}") else s.rng.choice(_LISTS_OF_TWO)
    written = s.chance(0.5) or name == "copy"
    xs = _members(s, kind, written)
    roll = s.rng.random()
    if roll < 0.3 and name != "copy":
        return _list_call(s, name, written, xs, s.rng.choice((2, 0.5, -1)))
    if roll < 0.45 and name != "copy":
        return _list_call(s, name, written, xs, [s.rng.choice((2, 0.5, -1)) for _ in xs])
    return _list_call(s, name, written, xs, [s.partner(s[x]) for x in xs])


def _list_of_three(s: Scope) -> None:
    name = s.rng.choice(("addcmul", "addcdiv", "lerp", "norm", "pow", "clamp_min"))
    written = s.chance(0.5) and name != "norm"
    xs = _members(s, "f", written)
    if name == "norm":
        return _list_call(s, name, False, xs, s.rng.choice((2, 1)))
    if name == "pow":
        return _list_call(s, name, written, xs, 2)
    if name == "clamp_min":
        return _list_call(s, name, written, xs, 0.5)
    if name == "lerp":
        return _list_call(s, name, written, xs, [s.partner(s[x]) for x in xs], 0.25)
    others = [s.partner(s[x]) for x in xs], [s.partner(s[x]) for x in xs]
    return _list_call(s, name, written, xs, *others, 2)


def power(s: Scope) -> None:
    """A power with a number, a tensor exponent, or of a number."""
    form = draw_form(s, "pow")
    form = "method" if form == "list" else form
    formed(s, "pow", target(s, form, "fi"), s.rng.choice((2, 3, 1, 0)), form=form)


def casts(s: Scope) -> None:
    """Another type."""
    x = s.pick("fcib")
    names = {"f": ("float32", "float64", "bfloat16", "int64", "int32", "bool", "complex128", "float16"),
             "c": ("complex64", "complex128"), "i": ("float64", "int32", "int64", "bool", "uint8", "float32"),
             "b": ("float64", "int64", "uint8")}[kind_of(s[x])]  # fmt: skip
    s.do(".to", x, getattr(torch, s.rng.choice(names)))


def likes(s: Scope) -> None:
    """New tensors like another one, and copies."""
    x = s.pick("fcib")
    name = s.rng.choice(
        ("clone", "clone", "contiguous", "zeros_like", "ones_like", "full_like", "new_zeros", "new_full")
    )
    if name in {"clone", "contiguous"}:
        s.do(f".{name}", x, form="method")
    elif name == "full_like":
        s.do("torch.full_like", x, 2)
    elif name.startswith("new"):
        shape = (s.rng.randint(1, 4), s.rng.randint(1, 4))
        s.do(f".{name}", x, shape, *((1,) if name == "new_full" else ()), form="method")
    else:
        s.do(f"torch.{name}", x)

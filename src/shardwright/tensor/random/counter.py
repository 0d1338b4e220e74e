"""Random ops by the counter-based generator: each rank computes the numbers of its own elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from shardwright.errors import RuleError
from shardwright.layout.layout import Layout
from shardwright.placement.base import Pending, Replicate
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.random.rows import rows_of
from shardwright.tensor.random.source import CounterSource, draw_key
from shardwright.tensor.spec import LocalUse, coords_of, spec_of, with_dtype
from shardwright.tensor.wrap import wrap

# From the source of numbers, the op's arguments by name and the dtype wanted to local values.
Draw = Callable[[CounterSource, Mapping[str, Any], torch.dtype], Tensor]


def uniform_numbers(source: CounterSource, given: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """Between `from` and `to`, by default 0 and 1."""
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    drawn = source.uniform(dtype)
    return drawn if (low, high) == (0.0, 1.0) else drawn.mul_(high - low).add_(low)


def normal_numbers(source: CounterSource, given: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """Of the mean and the deviation given, by default 0 and 1."""
    return source.normal(dtype).mul_(given.get("std", 1.0)).add_(given.get("mean", 0.0))


def _random(source: CounterSource, given: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    low, high = given.get("from", 0), given.get("to")
    return source.integers(low, (_limit(dtype) if high is None else high) - low)


def _limit(dtype: torch.dtype) -> int:
    """One more than the largest number that `random_()` draws: floats end where integers get gaps."""
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps) + 1
    return 2 if dtype == torch.bool else min(torch.iinfo(dtype).max, 2**63 - 2) + 1


def whole_numbers(source: CounterSource, given: Mapping[str, Any], dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    """From `low` on, below `high`."""
    low = given.get("low", 0)
    return source.integers(low, given["high"] - low)


FILLING: dict[str, Draw] = {
    "uniform": uniform_numbers,
    "normal": normal_numbers,
    "normal_functional": normal_numbers,
    "log_normal": lambda source, given, dtype: normal_numbers(source, given, dtype).exp_(),
    "exponential": lambda source, given, dtype: source.inside(dtype).log_().div_(-given["lambd"]),
    "cauchy": lambda source, given, dtype: (
        source.inside(dtype).sub_(0.5).mul_(math.pi).tan_().mul_(given["sigma"]).add_(given["median"])
    ),
    "geometric": lambda source, given, dtype: (
        source.inside(dtype).log_().div_(math.log1p(-given["p"])).ceil_().clamp_(min=1)
    ),
    "bernoulli": lambda source, given, _: source.below(given["p"]),
    "random": _random,
    "rand_like": uniform_numbers,
    "randn_like": normal_numbers,
    "randint_like": whole_numbers,
}
_ANY_DTYPE = ("bernoulli", "geometric", "random", "randint_like")


def draw(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """The op's result, or NotImplemented for ops that are drawn in full.

    Raises: RuleError: inside a compiled graph; what torch raises for the op's arguments.
    """
    given = bound(func, args, kwargs)
    if any(argument.is_out for argument in func._schema.arguments):
        return NotImplemented
    name = func._schema.name.removeprefix("aten::")
    if name == "normal" and func._schema.overload_name.startswith(("Tensor", "float_T")):
        return _normal_of_tensors(given)
    if name == "bernoulli" and not func._schema.overload_name:
        return _chance(given["self"], given["self"], given["generator"])
    if isinstance(given.get("p"), Tensor):
        made = _chance(given["self"], given["p"], given["generator"])
        return given["self"].copy_(made) if func._schema.is_mutable else made
    if name in ("rrelu_with_noise", "rrelu_with_noise_"):
        return _random_slopes(given, in_place=func._schema.is_mutable and name.endswith("_"))
    make = FILLING.get(name.removesuffix("_"))
    x = given.get("self")
    if make is None or not isinstance(x, DTensor) or isinstance(given.get("high"), Tensor):
        return NotImplemented
    dtype = given.get("dtype") or x.dtype
    if dtype.is_complex or not (dtype.is_floating_point or name.removesuffix("_") in _ANY_DTYPE):
        return NotImplemented
    if func._schema.is_mutable:
        _refuse_arguments(func, x, args[1:], kwargs)
        return _fill(x, make, given)
    return made_like(x, make, given, dtype)


def bound(func: Op, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Arguments by name, with their defaults."""
    arguments = func._schema.arguments
    given = {a.name: a.default_value for a in arguments if a.has_default_value()}
    names = [argument.name for argument in arguments]
    return {"generator": None, **given, **dict(zip(names, args, strict=False)), **kwargs}


def _refuse_arguments(func: Op, x: DTensor, rest: tuple[Any, ...], kwargs: Kwargs) -> None:
    """torch judges a negative deviation, a probability above 1, ...: on a tensor without elements."""
    func(torch.empty(0, dtype=x.dtype, device=x._local_tensor.device), *rest, **kwargs)


def finished(layout: Layout) -> Layout:
    """The layout in which every rank holds whole numbers: what is pending is replicated."""
    if not layout.pending_axes:
        return layout
    placements = tuple(Replicate() if p.is_pending else p for p in layout.placements)
    return layout.with_placements(placements, order=layout.order_names)


def source_for(
    layout: Layout, mesh: Any, device: torch.device, generator: torch.Generator | None
) -> CounterSource | None:
    """The numbers of this rank for one op; None on a rank outside the mesh, which draws the key all the same.

    Raises: RuleError: inside a compiled graph.
    """
    if torch.compiler.is_compiling():
        raise RuleError(
            "random_mode('counter') draws its keys while the program runs, so not inside a compiled graph\n"
            "  fix: random_mode('full') around the compiled call"
        )
    key = draw_key(generator)
    coords = coords_of(mesh)
    return None if coords is None else CounterSource(key, layout, coords, device, rows_of(key, layout.ranks))


def _fill(x: DTensor, make: Draw, given: Mapping[str, Any]) -> DTensor:
    mesh, layout = x.device_mesh, x._spec.layout
    source = source_for(finished(layout), mesh, x._local_tensor.device, given["generator"])
    if source is not None:
        x._local_tensor.copy_(_embedded(make(source, given, x.dtype), layout, source.coords))
    return x


def _embedded(local: Tensor, layout: Layout, coords: tuple[int, ...]) -> Tensor:
    """What a coord holds of finished numbers where the layout is pending."""
    for axis in layout.pending_axes:
        placement = layout.placements[axis]
        if isinstance(placement, Pending):
            local = placement.embed(local.to(layout.dtype), layout.sizes[axis], coords[axis])
    return local


def made_like(x: DTensor, make: Draw, given: Mapping[str, Any], dtype: torch.dtype) -> DTensor:
    """A new tensor of the shape and the finished layout of `x`."""
    layout = with_dtype(finished(x._spec.layout), dtype)
    return made(layout, x.device_mesh, x._local_tensor.device, make, given, x._spec.use)


def made(
    layout: Layout,
    mesh: Any,
    device: torch.device,
    make: Draw,
    given: Mapping[str, Any],
    use: LocalUse | None = None,
) -> DTensor:
    """A new tensor of this layout."""
    source = source_for(finished(layout), mesh, device, given["generator"])
    if source is None:
        local = torch.empty(0, dtype=layout.dtype, device=device)
    else:
        coords = source.coords
        local = torch.empty_strided(
            layout.local_shape(coords), layout.local_stride(coords), dtype=layout.dtype, device=device
        )
        local.copy_(_embedded(make(source, given, layout.dtype), layout, coords))
    return wrap(local, spec_of(layout, mesh, use))


def standard(layout: Layout, mesh: Any, *, normal: bool) -> DTensor:
    """`sw.rand` and `sw.randn`."""
    make = normal_numbers if normal else uniform_numbers
    return made(layout, mesh, torch.device(mesh.device_type), make, {"generator": None})


# ------------------------------------------------------------------------------- arguments that are tensors


def _normal_of_tensors(given: Mapping[str, Any]) -> Any:
    mean, std = given["mean"], given["std"]
    operands = [x for x in (mean, std) if isinstance(x, DTensor)]
    shape = torch.broadcast_shapes(*(x.shape for x in (mean, std) if isinstance(x, Tensor)))
    like = next((x for x in operands if x.shape == shape), None)
    if like is None or like.is_complex():
        return NotImplemented
    drawn = made_like(like, normal_numbers, {"generator": given["generator"]}, like.dtype)
    return drawn * std + mean


def _chance(x: DTensor, probability: Tensor, generator: torch.Generator | None) -> Any:
    """One where a number of 32 bits is below the probability."""
    if not isinstance(x, DTensor):
        return NotImplemented
    drawn = made_like(x, lambda source, *_: source.fraction(), {"generator": generator}, torch.float64)
    return (drawn < probability).to(x.dtype)


def _random_slopes(given: Mapping[str, Any], *, in_place: bool) -> Any:
    x, noise = given["self"], given["noise"]
    if not isinstance(x, DTensor) or not isinstance(noise, DTensor):
        return NotImplemented
    if given["training"]:
        drawn = made_like(x, lambda source, _, dtype: source.slopes(dtype), given, noise.dtype)
        out = leaky(x, noise, drawn, given["lower"], given["upper"])
    else:
        out = leaky_relu(x, (given["lower"] + given["upper"]) / 2)
    return x.copy_(out) if in_place else out


def leaky(x: Tensor, noise: Tensor, fractions: Tensor, lower: float, upper: float) -> Tensor:
    """`x` by slopes between two numbers where it is not positive; `noise` keeps them for the backward."""
    noise.copy_(fractions).mul_(upper - lower).add_(lower).masked_fill_(x > 0, 1.0)
    return x * noise


def dropout(x: DTensor, layout: Layout, p: float, train: bool | None) -> tuple[DTensor, DTensor]:
    """What `x` is multiplied with (0 or 1 / (1 - p)), and the mask of what is kept, in a finished layout."""
    keep = 1.0 - p if train or train is None else 1.0
    device, mesh = x._local_tensor.device, x.device_mesh
    make, given = FILLING["bernoulli"], {"generator": None, "p": keep}
    mask = made(with_dtype(layout, torch.bool), mesh, device, make, given, x._spec.use)
    scale = 0.0 if keep == 0 else 1.0 / keep
    return cast(DTensor, mask.to(x.dtype) * scale), mask

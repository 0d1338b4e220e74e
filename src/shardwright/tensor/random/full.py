"""Random ops: which way they are drawn, and the way that equals one device.

By default every rank draws for the whole logical tensor and keeps its part.
Law: with the generators of all ranks in the same state, neither placements nor world size change the result,
and the generators go on as on one device.
Cost: no communication for ops that only fill; those that read values (bernoulli of probabilities,
multinomial, poisson) gather them. Time and transient memory of the full tensor on every rank.
Under `random_mode("counter")` an element's numbers follow from its logical index (`random/counter.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from shardwright.comm.record import record_decision
from shardwright.compat import is_composite, tree_flatten, tree_leaves, tree_unflatten
from shardwright.errors import RuleError
from shardwright.layout.layout import Layout
from shardwright.placement.base import Replicate
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.rules.op import by_name
from shardwright.tensor.distribute import own_part
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.move import whole_unasked
from shardwright.tensor.plain.replicated import replicate_plain
from shardwright.tensor.random import counter as counter_draws
from shardwright.tensor.random import mode
from shardwright.tensor.random.shared_stream import shared_stream
from shardwright.tensor.spec import Spec, coords_of, spec_of, with_dtype
from shardwright.tensor.wrap import wrap

aten = torch.ops.aten

# What their first operand holds is overwritten or never looked at: only its shape, strides and dtype count.
_FILLS = frozenset(
    {
        "bernoulli_.Tensor",
        "bernoulli_.float",
        "bernoulli.p",
        "bernoulli.Tensor",
        "cauchy",
        "cauchy_",
        "exponential",
        "exponential_",
        "geometric",
        "geometric_",
        "log_normal",
        "log_normal_",
        "normal_",
        "normal_functional",
        "rand_like",
        "randint_like",
        "randn_like",
        "random",
        "random_",
        "uniform",
        "uniform_",
    }
)
# They draw a number for each value of their first operand.
_OF_EACH_VALUE = frozenset({"bernoulli", "binomial", "normal", "poisson", "_standard_gamma"})
# Their kernels draw inside, in an order of their own that no slice of a full draw repeats.
_NOT_DRAWN_HERE = ("attention", "sdp_choice", "rnn", "lstm", "dropout_mask", "dropout_state", "nested")


def draw_of(func: Op) -> Callable[[Op, Args, Kwargs], Any] | None:
    """What runs an op that torch marks as drawing; None: it consists of others which do, or draws inside."""
    inside = any(word in func._schema.name for word in _NOT_DRAWN_HERE)
    return None if func.namespace != "aten" or inside or is_composite(func) else draw


def draw(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """One random op on DTensors; results take the layout of the first operand of their shape.

    Raises: RuleError: a plain tensor beside a DTensor, as for any op; an `out=` of another shape; and what
        `shared_stream` raises.
    """
    ours = [value for value in tree_leaves((args, kwargs)) if isinstance(value, DTensor)]
    x = ours[0]
    writes = func._schema.is_mutable
    noise_in_a_graph = x._spec.use is not None and not writes and torch.compiler.is_compiling()
    if noise_in_a_graph or x._local_tensor.is_meta:
        return _drawn(func, args, kwargs)  # on a parameter in a compiled forward each rank draws its own
    # A parameter that is written: its copies are trained alike from then on.
    is_state = writes and (x._spec.use is not None or isinstance(x, torch.nn.Parameter))
    placements = x._spec.layout.placements if _keeps_cuts(func, ours) else (Replicate(),) * x.device_mesh.ndim
    with shared_stream(x.device_mesh, placements, kwargs.get("generator"), whoever_seeded=is_state):
        return _drawn(func, args, kwargs)


def _keeps_cuts(func: Op, operands: list[DTensor]) -> bool:
    """Does each rank keep its own part of the result, as of the first operand?"""
    one_shape = all(x.shape == operands[0].shape for x in operands)  # else the result is as a later one
    of_values = func._schema.name.removeprefix("aten::") in _OF_EACH_VALUE
    return (of_values and one_shape) or func is aten.native_dropout.default or fills(func)


def _drawn(func: Op, args: Args, kwargs: Kwargs) -> Any:
    if func is aten.native_dropout.default:
        return _dropout(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("train", True))
    if mode.is_counter():
        out = counter_draws.draw(func, args, kwargs)
        if out is not NotImplemented:
            return out
        record_decision(func.name(), "full draw: the counter generator does not cover this op")
    return _full(func, args, kwargs)


def fills(func: Op) -> bool:
    """Is the first operand only a shape to fill?"""
    name = func._schema.name.removeprefix("aten::")
    return name in _FILLS or f"{name}.{func._schema.overload_name}" in _FILLS


# ------------------------------------------------------------------------------------------- full draws


def _full(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """The op on whole tensors, of which every rank keeps its part."""
    named = by_name(func, args, kwargs)
    ours = [value for _, value in _tensors(named) if isinstance(value, DTensor)]
    mesh = ours[0].device_mesh
    whole = {name: _whole(func, name, value, mesh) for name, value in named.items()}
    result = func(**whole)
    written = _written(func, named, whole)
    for given, changed in written:
        _write_back(func, given, changed)
    given_of = {id(changed): given for given, changed in written}
    flat, tree = tree_flatten(result)
    kept = [
        value if not isinstance(value, torch.Tensor) else given_of.get(id(value), _part(value, ours))
        for value in flat
    ]
    return tree_unflatten(kept, tree)


def _tensors(named: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, value) for name, value in named.items() if isinstance(value, torch.Tensor))


def _whole(func: Op, name: str, value: Any, mesh: DeviceMesh) -> Any:
    """The whole value of an argument; memory of its shape where the op only fills it."""
    if not isinstance(value, torch.Tensor):
        return value
    argument = next(a for a in func._schema.arguments if a.name == name)
    is_written = argument.alias_info is not None and argument.alias_info.is_write
    if not isinstance(value, DTensor):
        return value if is_written else replicate_plain(value, mesh, func)._local_tensor
    only_filled = (name == func._schema.arguments[0].name and fills(func)) or argument.is_out
    if only_filled or coords_of(mesh) is None:
        layout = value._spec.layout
        made = torch.empty_strided(
            layout.shape, layout.stride, dtype=value.dtype, device=value._local_tensor.device
        )
        return made if only_filled else made.fill_(1)  # a rank outside the mesh only keeps in step
    return _gathered(func, value, copy=is_written)


def _gathered(func: Op, x: DTensor, *, copy: bool) -> torch.Tensor:
    whole = whole_unasked(func.name(), x, "its numbers depend on the values of the whole tensor")
    return whole.clone() if copy else whole


def _written(
    func: Op, named: Mapping[str, Any], whole: Mapping[str, Any]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of a tensor that the user gave to be written, and the whole one that was."""
    infos = {a.name: a.alias_info for a in func._schema.arguments}
    pairs = [(value, whole[name], infos[name]) for name, value in _tensors(named)]
    return [(given, made) for given, made, info in pairs if info is not None and info.is_write]


def _write_back(func: Op, given: torch.Tensor, whole: torch.Tensor) -> None:
    if not isinstance(given, DTensor):
        return
    layout = given._spec.layout
    if tuple(whole.shape) != tuple(layout.shape):
        raise RuleError(
            f"{func.name()}: out= is {layout}, the result has shape {tuple(whole.shape)}\n"
            "  fix: give an out= of that shape"
        )
    coords = given._spec.coords
    if coords is not None:
        given._local_tensor.copy_(layout.split(whole, coords))


def _part(whole: torch.Tensor, operands: list[DTensor]) -> DTensor:
    """This rank's part of a new result, placed like the first operand of that shape, else replicated."""
    like = next((x for x in operands if tuple(x.shape) == tuple(whole.shape)), None)
    mesh = operands[0].device_mesh
    placements: Any = (Replicate(),) * mesh.ndim
    order = None
    if like is not None:
        placements = tuple(Replicate() if p.is_pending else p for p in like._spec.layout.placements)
        order = like._spec.layout.order_names
    layout = Layout(
        mesh, placements, tuple(whole.shape), dtype=whole.dtype, stride=tuple(whole.stride()), order=order
    )
    return _own(whole, layout, mesh, operands[0]._spec)


def _own(whole: torch.Tensor, layout: Layout, mesh: DeviceMesh, like: Spec) -> DTensor:
    coords = coords_of(mesh)
    local = whole.new_empty(0) if coords is None else own_part(whole, layout, coords)
    return wrap(local, spec_of(layout, mesh, like.use))


# ---------------------------------------------------------------------------------------------- dropout


def of_terms(func: Callable[..., Any], args: Args, kwargs: dict[str, Any]) -> Any:
    """`F.dropout` and `torch.dropout`: terms stay terms, for what they are multiplied with is none.

    torch draws in `empty_like(x)`, which is memory for terms: both would be finished for the product.
    """
    x, p, is_on = _asked(*args, **kwargs)
    if not is_on or not 0 < p < 1 or not isinstance(x, DTensor) or not x._spec.pending:
        return func(*args, **kwargs)
    return x * torch.zeros_like(x).bernoulli_(1 - p).div_(1 - p)


def _asked(
    input: Any,  # noqa: A002  torch's name
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    train: bool = True,
) -> tuple[Any, float, bool]:
    return input, p, training and train and not inplace


OWN: dict[Any, Callable[..., Any]] = {functional.dropout: of_terms, torch.dropout: of_terms}


def _dropout(x: DTensor, p: float, train: bool | None) -> tuple[DTensor, DTensor]:
    """Linear in x for a given mask, so a pending sum stays pending."""
    placements = tuple(Replicate() if q.is_pending else q for q in x._spec.layout.placements)
    layout = x._spec.layout.with_placements(placements, order=x._spec.layout.order_names)
    if mode.is_counter():
        scaled, mask = counter_draws.dropout(x, layout, p, train)
    else:
        ones = torch.ones(x._spec.layout.shape, dtype=x.dtype, device=x._local_tensor.device)
        drawn = aten.native_dropout(ones, p, train)
        layouts = (layout, with_dtype(layout, drawn[1].dtype))
        scaled, mask = (_own(*pair, x.device_mesh, x._spec) for pair in zip(drawn, layouts, strict=True))
    return cast(DTensor, x * scaled), mask

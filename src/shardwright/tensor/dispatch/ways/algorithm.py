"""Running an algorithm in place of an op: its operands finished once, its results as the op promises them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from shardwright.comm.record import record_decision, recording
from shardwright.compat import tree_leaves, tree_map_only
from shardwright.compat.symbols import hints
from shardwright.errors import ImplicitRedistributionError, LayoutError
from shardwright.placement.base import Replicate
from shardwright.rules.algorithms.algorithm import Chosen, algorithm_for
from shardwright.rules.call import Args, Call, Kwargs, Op, TensorInfo
from shardwright.rules.op import by_name, functional_form
from shardwright.rules.propagate import propagate
from shardwright.rules.refusal import implicit_text
from shardwright.tensor.dispatch.asked import Asked
from shardwright.tensor.dispatch.ways.local_rows import run_on_parts
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.move import move_in_algorithm
from shardwright.tensor.spec import spec_of
from shardwright.tensor.wrap import common_use, used_as, with_stride, wrap


@dataclass(frozen=True, slots=True)
class ByAlgorithm:
    """A decided call that is taken apart: other ops give its value with less communication.

    Args:
        call: the logical call.
        chosen: the algorithm and its price.
        instead: what the cheapest rule would have done, for the record.
    """

    call: Call
    chosen: Chosen
    instead: str

    def run(self, _func: Op, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor]) -> Any:
        """The op's results, as DTensors; operands that are written come back as the objects that were given.

        Raises: ImplicitRedistributionError: inside `explicit()`, if a step has to communicate.
        """
        op = self.call.op
        if recording():
            record_decision(op.name(), self.chosen.reason, f"instead of {self.instead}")
        try:
            if op._schema.is_mutable:
                return self._into_operands(args, kwargs)
            out = self._compute(op, args, kwargs)
        except ImplicitRedistributionError:
            raise ImplicitRedistributionError(self._refusal(args, kwargs)) from None
        flat = self._fitted(out)
        if tensors[0]._spec.use is not None:
            use = common_use(tensors)
            flat = [used_as(x, use) if isinstance(x, DTensor) else x for x in flat]
        return flat[0] if len(flat) == 1 and not isinstance(out, list | tuple) else tuple(flat)

    def _refusal(self, args: Args, kwargs: Kwargs) -> str:
        """Why it may not run, in terms of the op that the user called."""
        layouts = tuple(x._spec.layout for x in tree_leaves((args, dict(kwargs))) if isinstance(x, DTensor))
        return implicit_text(self.call, layouts, propagate(self.call, layouts).inputs, self.chosen.reason)

    def _compute(self, op: Op, args: Args, kwargs: Kwargs) -> Any:
        args, kwargs = tree_map_only(DTensor, lambda x: finished(x, op.name()), (args, dict(kwargs)))
        algorithm = self.chosen.algorithm
        if algorithm.rows is not None:
            out = run_on_parts(algorithm.rows, args, kwargs, finished)
            if out is not NotImplemented:
                return out
        return algorithm.function(op, *args, **kwargs)

    def _fitted(self, out: Any) -> list[Any]:
        """The results in the dtypes and the order in memory that the op has.

        Raises: LayoutError: the algorithm is wrong.
        """
        flat = list(out) if isinstance(out, list | tuple) else [out]
        infos = self.call.results
        return [self._fit(value, info) for value, info in zip(flat, infos, strict=True)]

    def _fit(self, value: Any, info: TensorInfo | None) -> Any:
        if info is None or not isinstance(value, torch.Tensor):
            return value
        traced = torch.compiler.is_compiling()
        if (hints(value.shape) if traced else tuple(value.shape)) != info.shape:
            raise LayoutError(
                f"{self.call.op.name()}: the algorithm ({self.chosen.algorithm}) gave the shape "
                f"{tuple(value.shape)}, not {info.shape}: the algorithm is wrong"
            )
        value = value if value.dtype == info.dtype else value.to(info.dtype)
        if not isinstance(value, DTensor):
            return value
        if value._is_view():  # of what was made on the way: nobody has it
            value = wrap(value._local_tensor, value._spec)
        if traced and value._spec.shown.layout.stride == info.stride:  # of symbols no number is asked for
            return value
        return with_stride(value, info.stride)

    def _into_operands(self, args: Args, kwargs: Kwargs) -> Any:
        """An in-place or `out=` form: the values of the functional form, copied into what is written."""
        op = self.call.op
        plain = cast("Op", functional_form(op))
        given = by_name(op, args, kwargs)
        outs = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        left = {name: value for name, value in given.items() if not _is_out(op, name)}
        named = {a.name: left.pop(a.name) for a in plain._schema.arguments if a.kwarg_only and a.name in left}
        out = self._compute(plain, tuple(left.values()), named)
        written = [given[name] for name in outs]
        for target, value in zip(written, self._fitted(out), strict=True):
            target.copy_(value)
        return written[0] if len(written) == 1 else tuple(written)


def by_algorithm(asked: Asked) -> ByAlgorithm | None:
    """The cheapest algorithm, where it sends no more than the rules would."""
    if asked.needs_whole_operands or not may_write(asked.func):
        return None
    chosen = algorithm_for(asked.call, asked.layouts, asked.decision)
    return None if chosen is None else ByAlgorithm(asked.call, chosen, asked.decision.reason)


def _is_out(op: Op, name: str) -> bool:
    return any(argument.name == name and argument.is_out for argument in op._schema.arguments)


def may_write(op: Op) -> bool:
    """Whether an op is functional, or a form of one whose results can be copied into what it writes."""
    if not op._schema.is_mutable:
        return True
    plain = functional_form(op)
    return plain is not None and not plain._schema.is_mutable


def finished(x: DTensor, why: str) -> DTensor:
    """`x` with every pending axis reduced and nothing else moved; `x` itself when there is none.

    Not differentiable. Cost: an all-reduce per pending axis.
    """
    if not x._spec.pending:
        return x
    layout = x._spec.layout
    target = layout.with_placements({layout.axes[axis]: Replicate() for axis in layout.pending_axes})
    return wrap(
        move_in_algorithm(why, x, target, "it finishes terms"), spec_of(target, x.device_mesh, x._spec.use)
    )


def finish(_: Op, args: Args, kwargs: Kwargs) -> DTensor:
    """The handler of `shardwright::finish`."""
    x, why = (*args, *kwargs.values())
    return finished(x, why)


def within(func: Op, args: Args, kwargs: Kwargs) -> None:
    """The handler of `shardwright::within`: each rank looks at what it holds."""
    x, *bounds = args
    func(x._local_tensor, *bounds, **kwargs)

"""A DTensor whose local tensor is still under way: whoever touches it first waits."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.comm.async_result import Later
from shardwright.comm.execute import execute_later
from shardwright.compat import nn_functions
from shardwright.layout.layout import Layout
from shardwright.plan.decide import one_round_bytes, plan_redistribution
from shardwright.rules.call import Args, Kwargs
from shardwright.tensor.autograd import Redistribute, apply
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.products_of_parts import Stretches, linear_of_parts, stretches_of
from shardwright.tensor.spec import Spec, spec_of
from shardwright.tensor.wrap import CLASSES, wrap

_slot = TorchDTensor.__dict__["_local_tensor"]


class ArrivingDTensor(DTensor):
    """A DTensor of `redistribute(..., async_op=True)`. Once its local tensor was asked for, it is a DTensor.

    Every way to the local tensor, torch's C++ dispatch included, asks for this attribute, so none can see
    memory that is still being written.
    """

    __slots__: list[str] = []
    _stretches: tuple[int, Stretches] | None  # of its local tensor, that each rank sends

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Args = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if CLASSES[True] in types:  # a parameter that computes as its local tensor is asked first
            return NotImplemented
        if func is nn_functions.linear and args and type(args[0]) is ArrivingDTensor:
            found = args[0]._product(args, kwargs or {})
            if found is not NotImplemented:
                return found
        return super().__torch_function__(func, types, args, kwargs)

    def _product(self, args: Args, kwargs: Kwargs) -> Any:
        """`F.linear` of it, in parts; NotImplemented: it has to be here."""
        held = _slot.__get__(self)
        if type(held) is not Later or self._stretches is None:
            return NotImplemented
        found = linear_of_parts(self._stretches, held, args, kwargs)
        if found is not NotImplemented:
            self._local_tensor  # noqa: B018 - all of it is here, and it is as any other
        return found

    @property
    def _local_tensor(self) -> torch.Tensor:
        held = _slot.__get__(self)
        if type(held) is Later:
            held = held.wait()
            _slot.__set__(self, held)
            self.__class__ = DTensor  # type: ignore[assignment]
        return held  # type: ignore[no-any-return]

    @_local_tensor.setter
    def _local_tensor(self, value: torch.Tensor | Later) -> None:
        _slot.__set__(self, value)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Any], flatten_spec: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> DTensor:
        return DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride)


def start_redistribution(x: DTensor, target: Layout) -> DTensor:
    """Post what the redistribution of `x` to `target`, on its own mesh, sends last, and return at once."""
    return apply(_Start, x, spec_of(target, x.device_mesh))


class _Start(Redistribute):
    """Its backward is that of any redistribution: complete when it returns."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, target: Spec) -> torch.Tensor:
        ctx.source = x._spec.token
        ctx.set_materialize_grads(False)
        local = x._local_tensor
        plan = plan_redistribution(x._spec.layout, target.layout)
        moved = execute_later(plan, local, target.mesh, reason="redistribute")
        if isinstance(moved, Later):
            return _arriving(moved, local.new_empty(0), x._spec.layout, target)
        return wrap(moved.view_as(moved) if moved is local else moved, target)


def _arriving(later: Later, empty: torch.Tensor, source: Layout, spec: Spec) -> DTensor:
    """`empty` stands in while the tensor is made: only its dtype and device are read."""
    made = cast("ArrivingDTensor", ArrivingDTensor.__new__(ArrivingDTensor, empty, spec, requires_grad=False))
    made._local_tensor = later
    large = source.numel * source.itemsize > one_round_bytes() * len(source.ranks)
    known = large and spec.coords is not None
    made._stretches = stretches_of(source, spec.layout, spec.coords) if known else None
    return made

"""`x.data`, and `x.data = value`: another value, and its memory, for the same tensor object.

torch replaces what the wrapper knows of sizes and strides; the local tensor and the layout are ours to
replace.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat.fully_shard.parameters import FsdpParameter, managing_unit
from shardwright.errors import RuleError
from shardwright.layout.layout import Layout
from shardwright.rules.call import Args
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.move import move_unasked
from shardwright.tensor.plain import boundary
from shardwright.tensor.plain.refuse import plain_beside
from shardwright.tensor.spec import spec_of
from shardwright.tensor.wrap import as_ours, as_replicated, wrap


def set_data(func: Any, args: Args, kwargs: dict[str, Any]) -> None:
    """Let `x` be the value from here on; a parameter keeps its placements where the number of dims stays.

    Where the value lies as `x` does, `x` shares its memory, as on one device.

    Raises: RuleError: a plain value outside of `spmd`, a value of another mesh, another shape or dtype for a
        parameter that `fully_shard` manages. Nothing has been changed then.
    Cost: a redistribution of the value to the placements of a parameter, where it lies otherwise.
    """
    x, value = args
    if not isinstance(x, DTensor) or not isinstance(value, torch.Tensor):
        func(*args, **kwargs)  # torch's own errors
        return
    unit = managing_unit(x)
    if unit is not None:
        _refuse_managed(unit, x, value)
    made = _made(x, _distributed(x, value))
    func(x, made)
    x._local_tensor, x._spec = made._local_tensor, made._spec
    if unit is not None:
        unit.follow_local()


def get_data(func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
    """`x.data`: the same memory, whose writes raise no version of `x`. A unit is told that gathers it."""
    unit = managing_unit(args[0])
    if unit is not None:
        unit.hand_out()
    made = func(*args, **kwargs)
    if isinstance(made, DTensor):
        made._local_tensor = made._local_tensor.data  # nor one of its local tensor
    return made


def _refuse_managed(unit: FsdpParameter, x: DTensor, value: torch.Tensor) -> None:
    if unit.is_gathered:
        raise RuleError(
            f"x.data = value: {unit.name} is gathered now; call reshard() of its fully_shard unit first"
        )
    if value.shape != x.shape or value.dtype != x.dtype:
        raise RuleError(
            f"x.data = value: x is {x._spec.layout}, a parameter that fully_shard gathers and cuts in this "
            f"shape and dtype, and value is {value.dtype} of shape {tuple(value.shape)}; change the module "
            "(resize its embedding, ...) before parallelize_fsdp"
        )


def _distributed(x: DTensor, value: torch.Tensor) -> DTensor:
    """The value as one of ours, on the mesh of `x`."""
    if not isinstance(value, TorchDTensor):
        if not (boundary.helpers_allowed(within=1) or boundary.is_same_everywhere(value)):
            raise RuleError(plain_beside("x.data = value", value))
        return as_replicated(value.detach(), x.device_mesh)
    ours = as_ours(cast("TorchDTensor", value.detach()))
    if ours.device_mesh != x.device_mesh:
        raise RuleError(
            f"x.data = value: x lives on {x._spec.layout.axes}, value on {ours._spec.layout.axes}; write "
            "x.data = value.redistribute(x.device_mesh, x.placements)"
        )
    return ours


def _made(x: DTensor, value: DTensor) -> DTensor:
    target = _target(x, value)
    local = value._local_tensor
    if target != value._spec.layout:
        local = move_unasked("x.data = value", value, target, "a parameter keeps its placements")
    return wrap(local, spec_of(target, x.device_mesh, x._spec.use))


def _target(x: DTensor, value: DTensor) -> Layout:
    old, new = x._spec.layout, value._spec.layout
    if not isinstance(x, nn.Parameter) or x.dim() != value.dim():
        return new
    return new.with_placements(old.placements, order=old.order_names)


_DATA: Any = torch.Tensor.data
OWN: dict[Any, boundary.Own] = {_DATA.__get__: get_data, _DATA.__set__: set_data}

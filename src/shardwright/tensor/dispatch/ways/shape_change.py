"""In-place changes of shape: `squeeze_`, `unsqueeze_`, `t_`, `transpose_`, `swapaxes_`, ...

The tensor stays the object that it is and gets the layout and the local tensor of the view that the op
without the underscore gives; what torch knows of its sizes and strides follows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwright.compat import no_dispatch
from shardwright.errors import RuleError
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.views import write_back
from shardwright.tensor.wrap import as_it_was, reshaped


def reshape_of(func: Op) -> Callable[[Op, Args, Kwargs], DTensor] | None:
    """What runs an op that torch marks as a view in place; None: `detach_`, which changes no shape."""
    return None if func is torch.ops.aten.detach_.default else reshape_in_place


def reshape_in_place(func: Op, args: Args, kwargs: Kwargs) -> DTensor:
    """The first argument, with another shape.

    Raises: RuleError: there is no op without the underscore to take the meaning from; a view that has a
        graph, with gradients switched off: torch makes that anew from the functions that made the view.
    """
    x: DTensor = args[0]
    if not torch.is_grad_enabled() and x._is_view() and x.grad_fn is not None:
        raise RuleError(_GRAPH.format(func.name(), func._schema.name.split("::")[1].rstrip("_")))
    before = as_it_was(x)
    write_back.stand_in(before, x)
    view = _out_of_place(func)(before, *args[1:], **kwargs)
    write_back.replace(view, x)
    x._local_tensor, x._spec = view._local_tensor, view._spec
    reshaped(x)
    with no_dispatch():
        func(*args, **kwargs)
    return x


_GRAPH = (
    "{}: changes the shape of a view that has a graph, while gradients are switched off: its gradient would "
    "be that of the shape before\n  fix: y = x.{}(...), or switch gradients on"
)


def _out_of_place(func: Op) -> Op:
    """The overload that returns a view and takes the same arguments; its name may be another (`.int`)."""
    namespace, name = func._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name.rstrip("_"), None)
    for overload in packet.overloads() if packet is not None else ():
        found: Op = getattr(packet, overload)
        if _arguments(found) == _arguments(func) and any(r.alias_info for r in found._schema.returns):
            return found
    raise RuleError(
        f"{func.name()}: changes a DTensor in place, and no op without the underscore says to what layout\n"
        "  fix: use the op that returns a new tensor, without the underscore"
    )


def _arguments(func: Op) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in func._schema.arguments]

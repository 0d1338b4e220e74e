"""In-place changes of shape (`t_`, `unsqueeze_`, ...) of what others still see in its old shape.

torch makes the graph of a subclass' view anew from its base, by the functions that made the view: of a base
that was turned meanwhile they give another view, and where its sizes fit the gradient of the wrong elements.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwright.compat import use_count
from shardwright.errors import RuleError
from shardwright.rules.call import Args
from shardwright.tensor.dtensor import DTensor


def change_shape(func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
    """Run it.

    Raises: RuleError: views of a tensor that wants a gradient, or a graph that saved it, are alive.
    """
    x = args[0]
    if isinstance(x, DTensor) and x.requires_grad and not x._is_view() and use_count(x) > 1 + x.is_leaf:
        same = func(x.detach(), *args[1:], **kwargs)
        if (same.shape, same.stride()) != (x.shape, x.stride()):
            name = func.__name__
            raise RuleError(_SEEN.format(name, name.rstrip("_")))
    return func(*args, **kwargs)


_SEEN = (
    "{}: changes the shape of a tensor of which views are alive, or which a graph has saved: their gradient "
    "would be that of other elements\n  fix: y = x.{}(...)"
)
_NAMES = ("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_")
OWN: dict[Any, Any] = {getattr(torch.Tensor, name): change_shape for name in _NAMES}

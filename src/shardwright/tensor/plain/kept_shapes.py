"""In-place changes of shape (`t_`, `unsqueeze_`, ...) of what others still see in its old shape.

torch makes the graph of a subclass' view anew from its base, by the functions that made the view. Where the
base was turned meanwhile they give another view, and where the view was, they give what it had been: a
gradient of the wrong elements, if its sizes fit.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwright.compat import tree_leaves, use_count
from shardwright.errors import RuleError
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.views import write_back
from shardwright.tensor.wrap import as_it_was

_TURNED = "_turned_among_views"  # of a base: it or a view of it was turned while views saw the old shape


def change_shape(func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
    """Run it.

    Raises: RuleError: views of a tensor that wants a gradient, or a graph that saved it, are alive.
    """
    x = args[0]
    if not isinstance(x, DTensor) or x.is_inference() or not _is_seen(x):
        return func(*args, **kwargs)
    before = as_it_was(x)
    turned = func(as_it_was(x), *args[1:], **kwargs)
    if (turned.shape, turned.stride()) == (x.shape, x.stride()):
        return func(*args, **kwargs)
    if x.requires_grad:
        name = func.__name__
        raise RuleError(_SEEN.format(name, name.rstrip("_")))
    out = func(*args, **kwargs)
    # As long as it is alive it counts as a view of what it was, so that no write passes by `refuse_graph`.
    write_back.remember(x, func, (before, *args[1:]), kwargs, copied=False)
    vars(_base(x))[_TURNED] = True
    return out


def _is_seen(x: DTensor) -> bool:
    """Are there views of its memory, or has a graph saved it? Of a view with a graph torch follows."""
    if x._is_view():
        return not x.requires_grad
    return bool(use_count(x) > 1 + (x.is_leaf and x.requires_grad))


def _base(x: torch.Tensor) -> torch.Tensor:
    base = x._base
    return x if base is None else base


def refuse_graph(func: Op, args: Args, kwargs: Kwargs) -> None:
    """Raises: RuleError: the write gives a graph to what was turned in place while views saw it."""
    if not write_back.origins.data or not torch.is_grad_enabled():
        return
    if any(_TURNED in vars(_base(x)) for x in write_back.written_by(func, args, kwargs)):
        tensors = [x for x in tree_leaves((args, dict(kwargs))) if isinstance(x, torch.Tensor)]
        if any(x.requires_grad for x in tensors):
            raise RuleError(_GRAPH.format(func.name()))


def want_gradient(func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
    """`requires_grad_` and `requires_grad =`. Raises: RuleError: as `refuse_graph`, of a leaf."""
    x, wanted = args[0], args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    if wanted and isinstance(x, DTensor) and _TURNED in vars(_base(x)):
        raise RuleError(_GRAPH.format(func.__name__))
    return func(*args, **kwargs)


_SEEN = (
    "{}: changes the shape of a tensor of which views are alive, or which a graph has saved: their gradient "
    "would be that of other elements\n  fix: y = x.{}(...)"
)
_GRAPH = (
    "{}: gives a graph to memory of which a tensor was turned in place (t_, unsqueeze_, ...) while views "
    "of it were alive: their gradient would be that of other elements\n"
    "  fix: y = x.t() (or x.unsqueeze(...)) in place of x.t_()"
)
_NAMES = ("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_")
OWN: dict[Any, Any] = {getattr(torch.Tensor, name): change_shape for name in _NAMES} | {
    torch.as_strided_: change_shape,
    torch.Tensor.requires_grad_: want_gradient,
    torch.Tensor.requires_grad.__set__: want_gradient,  # type: ignore[attr-defined]
}

"""What autograd's graph tells of a view's base while a gradient is put back into it: its layout.

No argument of a gradient's op says how the base of the view was laid out. Its node does: the one that follows
it in the graph made the base, and notes here how it lies; a leaf is known itself.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwright.compat import current_autograd_node, current_graph_task_id
from shardwright.layout.layout import Layout
from shardwright.rules.call import Op
from shardwright.tensor.dtensor import DTensor

_KEY = "shardwright: layouts of the results"
# Autograd has not asked for the node before these run. To ask here is to make it anew where the tensor is a
# view whose base was written, with views that are themselves calls: below autograd there is no way to them.
_WITHOUT_GRADIENT = frozenset({torch.ops.aten.detach.default, torch.ops.aten.view.dtype})


def note(x: DTensor, func: Op) -> None:
    """Remember the layout of a tensor in a graph of which `func` takes a view, as long as the graph lives."""
    if func in _WITHOUT_GRADIENT or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    node: Any = x.grad_fn
    if node is not None:
        node.metadata.setdefault(_KEY, {})[x.output_nr] = x._spec.layout


def base_layout() -> Layout | None:
    """The layout of the only tensor for which the running node computes a gradient; None: not known."""
    if current_graph_task_id() == -1:
        return None
    node: Any = current_autograd_node()
    if node is None or len(node.next_functions) != 1:
        return None
    following, output = node.next_functions[0]
    if following is None:
        return None
    leaf = getattr(following, "variable", None)
    if leaf is not None:
        return leaf._spec.layout if isinstance(leaf, DTensor) else None
    known: dict[int, Layout] = following.metadata.get(_KEY, {})
    return known.get(output)

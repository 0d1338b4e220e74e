"""Views that every rank takes of its local tensor."""

from __future__ import annotations

from shardwright.rules.catalog.view_maps import on_elements
from shardwright.tensor.dispatch.asked import Asked
from shardwright.tensor.views.take import ViewCall, cuts_through, view_call


def of_a_cut_dim(asked: Asked) -> ViewCall | None:
    """Some indices of a dim that an axis cuts: the rules could only make it whole."""
    if asked.needs_whole_operands or asked.views is None or on_elements(asked.func):
        return None
    none = not asked.views  # the rows of what has none
    return _taken(asked) if none or cuts_through(asked.views[0][0], asked.layouts[0]) else None


def instead_of_a_move(asked: Asked) -> ViewCall | None:
    """Any other view for which the rules would move something."""
    if asked.needs_whole_operands or asked.views is None or asked.decision.inputs == asked.layouts:
        return None
    return None if _changes_terms(asked) else _taken(asked)


def _taken(asked: Asked) -> ViewCall | None:
    if asked.views is None:
        return None
    return view_call(asked.func, asked.call, asked.views, asked.layouts[0], asked.mesh, asked.use)


def _changes_terms(asked: Asked) -> bool:
    """Whether the op makes other elements of pending ones: the least of complex numbers is not there."""
    made, layout = asked.decision.outputs[0] if on_elements(asked.func) else None, asked.layouts[0]
    return made is not None and any(made.placements[i] != layout.placements[i] for i in layout.pending_axes)

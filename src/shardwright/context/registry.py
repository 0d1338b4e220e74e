"""The open set of domains.

Module-level state on purpose: a library registers its domain once, for every context made later. The context
that is open when a domain is registered gets the mesh at once, because groups must be made by all ranks
together and a first use may happen on some ranks only.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.context.context import DistributedContext
from shardwright.context.degrees import Degrees
from shardwright.context.domains import BUILT_IN_DOMAINS, DomainSpec, as_axes
from shardwright.context.process import ProcessWorld
from shardwright.errors import MeshError

_specs: dict[str, DomainSpec] = dict(BUILT_IN_DOMAINS)
_newest: list[DistributedContext] = []


def register_domain(name: str, axes: DomainSpec | Mapping[str, int]) -> None:
    """Add a domain: one more way to factor the world into named axes.

    Collective while a context is open: every rank registers the same domains in the same order.

    Args:
        name: what `mesh_for` is asked for. A built-in name is refused; one of your own is replaced.
        axes: {axis name: size}, row-major over the ranks, or a function from the degrees to such a mapping.

    Raises:
        MeshError: the name is built in, or the sizes do not multiply to the world of the open context.
    """
    if str(name) != name or not name or name in BUILT_IN_DOMAINS:
        raise MeshError(f"domain name {name!r} is taken by a built-in domain or is no name; choose another")
    spec = _as_spec(name, axes)
    for context in _newest:
        if context.is_open:
            context.add_domain(name, spec)
    _specs[name] = spec


def open_context(parameters: Degrees, world: ProcessWorld) -> DistributedContext:
    """Return a context with the mesh of every registered domain, which later registrations reach."""
    context = DistributedContext(parameters, world, _specs)
    _newest[:] = [context]
    return context


def _as_spec(name: str, axes: DomainSpec | Mapping[str, int]) -> DomainSpec:
    """Return a fixed mapping as a function of the degrees."""
    if callable(axes):
        return axes
    fixed = as_axes(name, axes)
    return lambda _: fixed

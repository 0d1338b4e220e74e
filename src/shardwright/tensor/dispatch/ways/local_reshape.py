"""Reshapes that each rank makes of its local tensor alone; for shapes never seen too."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.compat import CANNOT_VIEW
from shardwright.remember import memo
from shardwright.rules.call import Args, Op
from shardwright.tensor.dispatch.prepared import Prepared
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.spec import Spec, SpecKind
from shardwright.tensor.views.take import copied_reshape
from shardwright.tensor.wrap import wrap
from shardwright.views.any_size import ReshapeForm, reshape_form

RESHAPES = frozenset({torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default})

_MANY = 16384
_FORMS = 8  # of one kind and count of sizes: other blocks
_forms: dict[tuple[Any, ...], list[tuple[ReshapeForm, SpecKind]]] = memo("local reshapes", {})


class LocalReshape:
    """One reshape of one layout: the spec of the result and the sizes of the local call."""

    __slots__ = ("size", "spec")

    def __init__(self, spec: Spec, size: tuple[int, ...]) -> None:
        self.spec = spec
        self.size = size

    def run(self, func: Op, args: Args) -> DTensor:
        """The view; a copy that remembers its base where the local strides do not merge."""
        try:
            return wrap(func._op(args[0]._local_tensor, self.size), self.spec)
        except CANNOT_VIEW:
            found = copied_reshape(self.spec, func, args, {}, args[0])
            if found is None:
                raise
            return found


def of_prepared(func: Op, args: Args, prepared: Prepared, out: DTensor) -> LocalReshape | None:
    """A prepared call as one local reshape, once it has run; None where it is more than that. Remembered."""
    spec = prepared.results[0] if len(prepared.results) == 1 else None
    if func not in RESHAPES or len(args) != 2 or spec is None or not prepared.checked:
        return None
    if prepared.moves or prepared.skip or prepared.local or prepared.call or prepared.gather_all:
        return None
    x, size = args
    source = x._spec
    if source.kind is not None and spec.kind is not None:
        form = reshape_form(source.layout, spec.layout)
        if form is not None:
            if len(_forms) >= _MANY:
                _forms.clear()
            known = _forms.setdefault((func, source.kind, len(size)), [])
            known.insert(0, (form, spec.kind))
            del known[_FORMS:]
    return LocalReshape(spec, tuple(out._local_tensor.shape))


def adapt(func: Op, args: Args) -> LocalReshape | None:
    """The reshape to sizes never seen, from one of the same kind; None if none is known that fits."""
    x, size = args
    source: Spec = x._spec
    shape = source.layout.shape
    for form, kind in _forms.get((func, source.kind, len(size)), ()):
        target = form.target_shape(shape, size)
        if target is not None:
            local = x._local_tensor.shape
            if 0 in local:
                return None
            return LocalReshape(kind.spec(target), form.local_sizes(local, target))
    return None

"""The finished form of a pending value: made for its first reader, kept beside the value for later ones.

A residual stream is read by a norm, an addition and the derivatives of both: each of them would finish it for
itself. The value keeps its layout; a copy of its spec says that a finished form may be known, so that a call
on it has another key than one on a value without, and calls on all other values cost nothing more.

Only where the program is one for all ranks: inside `spmd`, and for what a backward makes of it. There no rank
writes what its peers do not. A form holds as long as neither the value nor its local tensor is written, which
their version counters say, and the storage counts what dispatch writes into it through tensors with a counter
of their own (`x.data`). A form lives as long as its value.
Not kept: where ranks may hold nothing (their storages count nothing), of memory that somebody has in his
hands (`to_local`, `from_local`: what a collective writes there is counted nowhere), of what a parameter
computes locally, without version counters (inference), and under a graph that is recorded.

Rejected: putting the form in the value's place. A read would change `x.placements`, and a write through an
older view would no longer reach the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.comm.record import record_decision, recording
from shardwright.compat import (
    DisableTorchFunctionSubclass,
    current_graph_task_id,
    records_a_graph,
    view_again,
)
from shardwright.layout.layout import Layout
from shardwright.placement.base import Replicate
from shardwright.remember import remembered
from shardwright.rules.call import Op
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.move_many import move_operands_together
from shardwright.tensor.plain.boundary import state
from shardwright.tensor.spec import spec_of
from shardwright.tensor.views import write_back
from shardwright.tensor.wrap import CLASSES, in_hands, is_reshaped, wrap

# Who remembers versions: while nobody does, storages need not count what is written into them.
watching: set[int] = set()


class Versions:
    """The versions of some tensors as they were, to be compared later; storages count while it lives."""

    __slots__ = ("_were",)

    def __init__(self, *xs: DTensor) -> None:
        watching.add(id(self))
        self._were = [versions(x) for x in xs]

    def hold(self, *xs: DTensor) -> bool:
        """Was none of these tensors written since?"""
        return self._were == [versions(x) for x in xs]

    def __del__(self, forget: Callable[[int], None] = watching.discard) -> None:
        forget(id(self))


@dataclass(frozen=True, slots=True)
class _Form:
    """A finished form, and what it was made of."""

    form: DTensor
    local: torch.Tensor
    versions: Versions


@dataclass(frozen=True, slots=True)
class _OfMemory:
    """The same, known by the storage, which must not be kept alive by it: for other names of the value."""

    form: DTensor
    layout: Layout
    lies: tuple[Any, ...]
    versions: Versions


def may_keep(x: DTensor) -> bool:
    """Is `x` a value whose finished form is kept?"""
    spec = x._spec
    if not spec.pending or spec.use is not None or not _may_now(x._local_tensor):
        return False
    return not x._local_tensor.is_inference() and not x.is_inference() and spec.held_by_all


def _may_now(local: torch.Tensor) -> bool:
    """What of it changes while a value lives."""
    if not state.blocks and current_graph_task_id() == -1:  # ranks may run other calls
        return False
    return not records_a_graph() and not in_hands(local)


def finishes(have: Layout, want: Layout) -> bool:
    """Does the move finish all that is pending, and nothing else?"""
    if have.mesh_shape != want.mesh_shape or not have.is_ordered_as(want):
        return False
    pairs = zip(have.placements, want.placements, strict=True)
    return all(new.is_replicated if old.is_pending else new == old for old, new in pairs)


@remembered(4096)
def finished_layout(layout: Layout) -> Layout:
    """Whole where it is pending."""
    placements = [Replicate() if p.is_pending else p for p in layout.placements]
    return layout.with_placements(placements, order=layout.order_names)


def known(x: DTensor) -> DTensor | None:
    """The finished form of `x`, if it is kept and `x` was not written since; of a view, that of its base."""
    has_form = x._spec.form is not None  # then the rest was asked when it was kept
    if not (_may_now(x._local_tensor) if has_form else may_keep(x)):
        return None
    kept = _of(x) if has_form else None
    if kept is None:
        base = _base(x)
        whole = None if base is None or not may_keep(base) else _of(base)
        if whole is not None:
            kept = keep(x, view_again(x, whole))
    return kept


def subject(x: DTensor) -> DTensor:
    """What is finished for `x`: the value that it is a view of, if it is all of it."""
    base = _base(x)
    return base if base is not None and base.numel() == x.numel() and may_keep(base) else x


def _base(x: DTensor) -> DTensor | None:
    """The value that `x` is a view of, unless its local tensor is a copy."""
    base: Any = x._base if x._is_view() else None
    if not isinstance(base, CLASSES[0]) or (write_back.origins.data and x in write_back.origins):
        return None
    if is_reshaped(base):
        return None
    same = base._local_tensor.untyped_storage()._cdata == x._local_tensor.untyped_storage()._cdata
    return base if same else None  # else its memory was exchanged since


def _of(x: DTensor) -> DTensor | None:
    kept: _Form | None = x._spec.form
    if kept is None or kept.local is not x._local_tensor:
        return None
    with DisableTorchFunctionSubclass():  # only looks, each of which would be asked of the class first
        return kept.form if kept.versions.hold(x) else None


def holds(x: object) -> bool:
    """Is there a finished form of `x`, or of what it is a view of?"""
    if not isinstance(x, CLASSES[0]) or not may_keep(x):
        return False
    base = _base(x)
    return _of(x) is not None or (base is not None and _of(base) is not None)


def keep(x: DTensor, form: DTensor) -> DTensor:
    """Keep the finished form of `x`; later calls on `x` ask for it."""
    versions, storage = Versions(x), x._local_tensor.untyped_storage()
    x._spec = x._spec.asking(_Form(form, x._local_tensor, versions))
    if storage._cdata != form._local_tensor.untyped_storage()._cdata:
        vars(storage)["finished"] = _OfMemory(form, x._spec.layout, _lies(x), versions)
    return form


def _lies(x: DTensor) -> tuple[Any, ...]:
    local = x._local_tensor
    return local.storage_offset(), local.stride(), local.dtype


def takes_over(x: DTensor) -> bool:
    """Is `x` another name (`detach()`, so a checkpoint saves it) of a value that was finished? It asks."""
    kept: _OfMemory | None = getattr(x._local_tensor.untyped_storage(), "finished", None)
    if kept is None or x._spec.form is not None or not may_keep(x) or x._spec.layout != kept.layout:
        return False
    if _lies(x) != kept.lies or not kept.versions.hold(x):
        return False
    keep(x, kept.form)
    return True


def give_up(x: DTensor) -> None:
    """Forget the finished form of `x`; its next reader makes another."""
    x._spec = x._spec.plain


def forget(x: DTensor) -> None:
    """Let nobody know what was finished or derived of `x`, by any of its names."""
    if x._spec is not x._spec.plain:
        give_up(x)
    vars(x).pop("_derived", None)
    if x._spec.pending:
        vars(x._local_tensor.untyped_storage()).pop("finished", None)


def ask(x: DTensor) -> None:
    """Calls on `x`, a view of something that was finished, ask whether its form is known."""
    if x._spec.form is None:
        x._spec = x._spec.asking()


def versions(x: DTensor) -> tuple[int, int, int]:
    """What a write into `x` changes, whoever writes."""
    local = x._local_tensor
    storage: Any = local.untyped_storage()
    writes = getattr(storage, "writes", None)
    if writes is None:
        writes = storage.writes = 0
    base = _base(x)
    return x._version, local._version if base is None else base._local_tensor._version, writes


def count_writes(written: Sequence[DTensor]) -> None:
    """Tell the storages of what was written, if forms of what lies there are kept.

    Also those of what a copied view is of: by their numbers of elements ranks would come to other answers.
    """
    for x in written:
        storage: Any = x._local_tensor.untyped_storage()
        writes = getattr(storage, "writes", None)
        if writes is not None:
            storage.writes = writes + 1
    if write_back.origins.data:
        for x in written:
            count_writes([*write_back.bases_of(x)])


def finished_from(x: DTensor, of: DTensor, local: torch.Tensor) -> torch.Tensor:
    """The local tensor of the finished form of `x`, once `of`, its `subject`, was finished."""
    form = keep(of, wrap(local, spec_of(finished_layout(of._spec.layout), of.device_mesh)))
    if of is not x:
        form = keep(x, view_again(x, form))
    return form._local_tensor


def form_of(op: str, x: DTensor) -> DTensor | None:
    """The finished form of a pending value, made if it is not known; None: it is not kept here.

    Raises: ImplicitRedistributionError: inside `explicit()`, where it would have to be made.
    """
    form = known(x)
    if form is not None:
        taken(op, x, form)
    elif may_keep(x):
        finish_together(op, [x], "read")
        form = known(x)
    return form


def finish_together(op: str, values: Iterable[DTensor], why: str = "read in one list") -> None:
    """Finish the values that are not yet, in as few collectives as they have kinds of moves.

    Raises: ImplicitRedistributionError: inside `explicit()`, before anything is sent.
    """
    missing = {id(x): x for x in map(subject, values) if may_keep(x) and known(x) is None}
    wanted = [(x, finished_layout(x._spec.layout)) for x in missing.values()]
    moved = move_operands_together(op, wanted, why)
    for (x, layout), local in zip(wanted, moved, strict=True):
        keep(x, wrap(local, spec_of(layout, x.device_mesh)))


def taken(op: Op | str, x: DTensor, form: DTensor) -> None:
    """Record that an op takes the form that was kept."""
    if recording():
        name = op if isinstance(op, str) else op.name()
        record_decision(name, "finished before, kept", f"{x._spec.layout} -> {form._spec.layout}")

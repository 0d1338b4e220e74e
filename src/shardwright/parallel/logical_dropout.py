"""Dropout masks that equal one device's whatever the mesh: the hooks that say which rows a rank sees."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.comm.functional import gather_rows
from shardwright.comm.record import because
from shardwright.compat import current_graph_task_id, saved_tensors_hooks_on
from shardwright.compat.dynamo import compiles_what_is_called
from shardwright.context.randomness import LOGICAL
from shardwright.context.submesh import groups_above_one
from shardwright.errors import ParallelError, RuleError
from shardwright.grads.stages import heard_by_stages
from shardwright.layout.mesh_shape import as_mesh_shape
from shardwright.parallel.meshes import one_axis, refuse_other_order
from shardwright.tensor.modules.same_model import agreed
from shardwright.tensor.random.logical_mode import LogicalMode
from shardwright.tensor.random.mode import random_mode
from shardwright.tensor.random.rows import BatchRows, enter, leave
from shardwright.tensor.random.source import draw_key

_MANY = 1 << 16  # draws whose rows are known until their backward has run
_NO_MODULE = (
    "logical dropout: dropout in a function that is checkpointed, or under no_grad inside of a module: what "
    "a backward runs again of it would not know its rows\n"
    "  fix: make it a module (nn.Dropout in the module that is checkpointed)"
)
_NO_CALL = (
    "logical dropout: this draw belongs to no call of the module that logical_dropout was given: a part of "
    "it was called by itself, or checkpointed with preserve_rng_state=False"
)


@heard_by_stages
def logical_dropout(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Draw dropout masks, and noise of rows, as one device would that has the whole batch; in place.

    The batch is what the ranks of the axis read, one after the other, rows in dim 0 of the first tensor that
    the forward takes. Each mask follows from a key and the element's index in the whole batch (Philox4x32-10,
    as in `random_mode("counter")`), so neither the mesh nor uneven rows change it. Strategies that place
    parameters, before or after, change nothing here. What a checkpoint computes again is dropped again alike,
    if it is a module (or inside of one) that is checkpointed.

    Args: mesh: the one axis whose ranks read other rows: `context.mesh_for("batch")["dp"]`.
    Returns: the module itself; hooks are added, nothing else.
    Raises: ParallelError: not one axis, applied twice, under torch.compile. When the module runs: generators
        that are not in the same state on all ranks (`context.seed(seed, dropout="logical")`), no tensor among
        the arguments. RuleError: a mask whose first dim is no multiple of the rows, a kernel that drops
        inside, a function (no module) with dropout that is checkpointed.
    Cost: an all-reduce of 40 bytes, once. An all-gather of 16 bytes per call of the module, and a broadcast
        of 5 KB where a rank has no rows (torch's dropout of nothing draws nothing, so it takes over the
        generator of one that has some); a mask costs several times torch's.
    Source: Salmon and others, SC11, section 3.3.
    """
    with agreed("logical_dropout", module, mesh):
        axis = one_axis(mesh, "logical_dropout", module, "dp")
        refuse_other_order(mesh, axis, "logical_dropout")
        for path, child in module.named_modules():
            if hasattr(child, LOGICAL):
                raise ParallelError(
                    f"logical_dropout: {path or 'the module'} draws its masks by logical index already; "
                    "apply it once"
                )
    scope = _RowsOfModule(mesh)
    setattr(module, LOGICAL, scope)
    module.register_forward_pre_hook(scope.begin, with_kwargs=True)
    module.register_forward_hook(scope.end, always_call=True)
    for child in module.modules():
        if child is not module:
            child.register_forward_pre_hook(scope.begin_inner)
            child.register_forward_hook(scope.end, always_call=True)
    return module


@dataclass(frozen=True, slots=True)
class _Frame:
    """One module that runs on this thread.

    Args:
        entered: what was on when it was entered: hooks on saved tensors, gradients.
        opened: the modes that it opened; None for one inside of another.
        rows: of the call; None where a backward runs a part of it again.
        leader: where a rank has no rows, the first of the axis that has: what it draws counts for them.
    """

    entered: tuple[object, bool]
    opened: tuple[random_mode, LogicalMode] | None
    rows: BatchRows | None
    leader: int | None = None


class _Here(threading.local):
    """The modules that run on this thread, the innermost last."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []


class _RowsOfModule:
    """The scope of one module: opened by its calls, and by what a backward runs again of it."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.ranks = frozenset(as_mesh_shape(mesh).ranks)
        self._group, self._device = mesh.get_group(), mesh.device_type
        self.groups = tuple(groups_above_one(mesh))  # over which its calls send
        self._here = _Here()
        self._known: OrderedDict[int, BatchRows] = OrderedDict()

    def __deepcopy__(self, memo: dict[int, Any]) -> _RowsOfModule:
        return self

    def begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The module is called."""
        if compiles_what_is_called():
            raise ParallelError("logical_dropout: a module that draws its masks by index is not compiled")
        if current_graph_task_id() != -1:  # again
            self._open(None)
        else:
            self._open(*self._agreed(_rows_in((*args, *kwargs.values()))))

    def begin_inner(self, *_: Any) -> None:
        """A part of it is: from it, or again by a backward, or by itself, in which case a draw says so."""
        frames = self._here.frames
        if frames:
            frames.append(_Frame(_entered(), None, frames[-1].rows))
        else:
            self._open(None)

    def end(self, *_: Any) -> None:
        """Either of them has ended, with a result or an error."""
        if not self._here.frames:
            return  # `begin` itself has failed
        frame = self._here.frames.pop()
        if frame.opened is not None:
            leave(self)
            for mode in reversed(frame.opened):
                mode.__exit__(None, None, None)
        if frame.leader is not None:
            self._follow(frame.leader, frame.rows)

    def _follow(self, leader: int, rows: BatchRows | None) -> None:
        """A rank without rows goes on from the generator of one that has some; those that have draw alike."""
        state = torch.get_rng_state().to(self._device)
        with because("generators of ranks without rows"):
            dist.broadcast(state, dist.get_global_rank(self._group, leader), self._group)
        if rows is not None and not rows.rows:
            torch.set_rng_state(state.cpu())

    def rows_of(self, key: int) -> BatchRows:
        """The rows that a draw is about: those of this call, or in a backward those of its forward.

        Raises: RuleError: they are not known, or would not be in the backward.
        """
        frame = self._here.frames[-1]
        if frame.entered != _entered():
            raise RuleError(_NO_MODULE)
        rows = frame.rows if frame.rows is not None else self._known.get(key)
        if rows is None:
            raise RuleError(_NO_CALL)
        self._known[key] = rows
        if len(self._known) > _MANY:
            self._known.popitem(last=False)
        return rows

    def draw_for(self, shape: Sequence[int]) -> tuple[int, BatchRows] | None:
        """See `Scope`: a backward that runs a part again knows by its keys what the forward drew.

        Raises: RuleError: what runs again would not know its rows.
        """
        rows = self._here.frames[-1].rows
        if rows is not None:
            if not rows.begin(shape):
                return None
            key = draw_key(None)
            return key, self.rows_of(key)
        before = torch.get_rng_state()
        key = draw_key(None)
        found = self._known.get(key)
        if found is None:
            torch.set_rng_state(before)
        return None if found is None else (key, found)

    def _open(self, rows: BatchRows | None, leader: int | None = None) -> None:
        opened = (random_mode("counter"), LogicalMode(self))
        self._here.frames.append(_Frame(_entered(), opened, rows, leader))
        for mode in opened:
            mode.__enter__()
        enter(self)

    def _agreed(self, rows: int) -> tuple[BatchRows, int | None]:
        """This rank's place among the rows of all, and the leader; see `_Frame`.

        Raises: ParallelError: generators differ.
        """
        state = xxhash.xxh3_64_intdigest(torch.get_rng_state().numpy().tobytes()) >> 1
        told = torch.tensor([rows, state], device=self._device)
        sizes = [1] * self._group.size()
        said = gather_rows(told[None], sizes, self._group, reason="rows of logical dropout").tolist()
        if any(other != state for _, other in said):
            raise ParallelError(
                "logical dropout: the generators of the ranks are in other states, and would drop by other "
                'keys\n  fix: context.seed(seed, dropout="logical") on every rank, and no draw on some only'
            )
        counts = [count for count, _ in said]
        leader = next((at for at, count in enumerate(counts) if count), None) if 0 in counts else None
        return BatchRows(sum(counts[: self._group.rank()]), rows), leader


def _entered() -> tuple[object, bool]:
    """What differs inside of a checkpointed function, and is the same in all that a module runs."""
    return saved_tensors_hooks_on(), torch.is_grad_enabled()


def _rows_in(values: tuple[Any, ...]) -> int:
    """The rows of the first tensor, which is what the module is called with."""
    first = next((x for x in values if isinstance(x, torch.Tensor) and x.ndim), None)
    if first is None:
        raise ParallelError("logical dropout: no tensor among the arguments, whose dim 0 would be the rows")
    return first.shape[0]

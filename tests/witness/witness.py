"""Who counts what the process groups were asked to do without asking the library: torch's own profiler.

The dispatcher notes every operator of `c10d` and the gloo backend every call that reaches it, whoever made it
and in whichever thread. What each one sends follows from what it was given; how many ranks take part, the
profiler does not know: that is looked up by the axis that the record names.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

from shardwright.comm.record import Event

_ITEM_BYTES = {
    "float": 4,
    "double": 8,
    "int": 4,
    "long int": 8,
    "unsigned char": 1,
    "signed char": 1,
    "c10::Half": 2,
    "c10::BFloat16": 2,
}
# The kind of each operator of the groups; what gloo itself runs for it may have another name.
_KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
    "send": "send",
    "recv": "recv",
}
# Where the operator of a kind is told who is the root.
_ROOT = {"broadcast": 2, "gather": 3, "scatter": 3, "reduce": 3}


@dataclass(frozen=True, slots=True)
class Asked:
    """One call of a process group. given: bytes of the operand; splits: those of an all-to-all."""

    kind: str
    given: int
    splits: tuple[int, ...] = ()
    root: int = 0


class Witness:
    """Counts while its block runs; `asked` afterwards, in order."""

    asked: list[Asked]

    def __enter__(self) -> Self:
        every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._profile = profile(
            activities=[ProfilerActivity.CPU], record_shapes=True, experimental_config=every_thread
        )
        self._profile.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._profile.__exit__(*error)
        self.asked = _asked(self._profile.profiler.kineto_results.events())


def _asked(events: Sequence[Any]) -> list[Asked]:
    """What reached the backend, each with the operator of the groups that it was asked by.

    gloo may note a call in a thread of its own; calls of one kind reach it in the order of their operators.
    """
    asked: list[Asked] = []
    waiting: dict[str, deque[Any]] = defaultdict(deque)
    for event in sorted(events, key=lambda e: e.start_ns()):
        name = event.name()
        if name.startswith("c10d::"):
            kind = _kind(event)
            # gloo's own reduce-scatter is an all-reduce of which it drops most.
            waiting["all_reduce" if kind == "reduce_scatter" else kind].append(event)
        elif name.startswith("gloo:"):
            asked.append(_call(waiting[name.removeprefix("gloo:")].popleft(), event))
    return asked


def _kind(operator: Any) -> str:
    name = operator.name().removeprefix("c10d::").strip("_")
    return next(_KINDS[start] for start in sorted(_KINDS, key=len, reverse=True) if name.startswith(start))


def _call(operator: Any, event: Any) -> Asked:
    kind, arguments = _kind(operator), operator.concrete_inputs()
    given = sum(
        _ITEM_BYTES[dtype] * prod(shape) for shape, dtype in zip(event.shapes(), event.dtypes(), strict=True)
    )
    splits = tuple(arguments[4]) if "alltoall_base" in operator.name() else ()
    return Asked(kind, given, splits, arguments[_ROOT[kind]] if kind in _ROOT else 0)


@dataclass(frozen=True, slots=True)
class Line:
    """What both say of one kind of call."""

    kind: str
    witnessed: int
    recorded: int
    witnessed_bytes: int
    recorded_bytes: int

    @property
    def agrees(self) -> bool:
        """The same number, and the same bytes."""
        return (self.witnessed, self.witnessed_bytes) == (self.recorded, self.recorded_bytes)


def compare(asked: Sequence[Asked], events: Sequence[Event], meshes: Sequence[DeviceMesh]) -> list[Line]:
    """Both sides kind by kind. Messages count by their bytes: the record joins those of one move."""
    lines = [_messages(asked, events)]
    witnessed, recorded = _by_operand(asked), defaultdict(list)
    for event in events:
        if event.op not in _MESSAGES:
            recorded[event.op, event.dtype.itemsize * prod(event.shape)].append(event)
    for kind in sorted({kind for kind, _ in (*witnessed, *recorded)}):
        sizes = {given for k, given in (*witnessed, *recorded) if k == kind}
        ours = [event for given in sizes for event in recorded[kind, given]]
        theirs = [
            _sent(call, event, meshes)
            for given in sizes
            for call, event in zip(witnessed[kind, given], recorded[kind, given], strict=False)
        ]
        count = sum(len(witnessed[kind, given]) for given in sizes)
        lines.append(Line(kind, count, len(ours), sum(theirs), sum(event.bytes_sent for event in ours)))
    return [line for line in lines if line.witnessed or line.recorded]


_MESSAGES = ("send", "recv", "send_recv")


def _messages(asked: Sequence[Asked], events: Sequence[Event]) -> Line:
    sent = [call.given for call in asked if call.kind == "send"]
    recorded = [event.bytes_sent for event in events if event.op in _MESSAGES]
    some = int(any(call.kind in _MESSAGES for call in asked))
    return Line("send_recv", some, int(bool(recorded)), sum(sent), sum(recorded))


def _by_operand(asked: Sequence[Asked]) -> Mapping[tuple[str, int], list[Asked]]:
    found = defaultdict(list)
    for call in asked:
        if call.kind not in _MESSAGES:
            found[call.kind, call.given].append(call)
    return found


def _sent(call: Asked, event: Event, meshes: Sequence[DeviceMesh]) -> int:
    """What leaves this rank when a group of the axis that the record names is asked for this."""
    if event.axis == "world":
        n, own = torch.distributed.get_world_size(), torch.distributed.get_rank()
    else:
        mesh = next(mesh for mesh in meshes if event.axis in (mesh.mesh_dim_names or ()))
        n, own = mesh[event.axis].size(), mesh[event.axis].get_local_rank()
    if call.kind == "all_reduce":
        return 2 * (n - 1) * call.given // n
    if call.kind == "all_gather":
        return (n - 1) * call.given
    if call.kind == "reduce_scatter":
        return (n - 1) * call.given // n
    if call.kind == "all_to_all":
        total = sum(call.splits)
        return call.given * (total - call.splits[own]) // total if total else 0
    if call.kind == "broadcast":
        return (n - 1) * call.given if own == call.root else 0
    if call.kind == "scatter":
        return (n - 1) * call.given // n if own == call.root else 0
    if call.kind in ("gather", "reduce"):
        return 0 if own == call.root else call.given
    if call.kind == "barrier":
        return 0
    raise NotImplementedError(call.kind)

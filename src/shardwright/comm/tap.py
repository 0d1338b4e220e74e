"""Every call that reaches a process group, whoever made it: this library, torch, the program; in any thread.

All of them go through torch's dispatcher: `torch.distributed`'s own functions, the functional collectives of
torch's DTensor and of compiled graphs, `fully_shard`. While somebody listens, the operators of the namespace
`c10d` have a kernel here that tells the listeners and then goes on; otherwise nothing is in the way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardwright.compat import before_each_call, group_of, tree_leaves


@dataclass(frozen=True, slots=True)
class GroupCall:
    """One call of a process group, before it runs. name: of torch's operator, such as `allreduce_`."""

    name: str
    args: tuple[Any, ...]
    group: dist.ProcessGroup

    @property
    def op(self) -> str:
        """The collective in words: `all_reduce`, `send`, ..."""
        return _KINDS[self.name].op

    @property
    def axis(self) -> str:
        """The mesh axis that the group is of, as far as the group says it; else its ranks."""
        described, size = self.group.group_desc, self.group.size()
        nobody = described in {"", "undefined"}  # the second is torch's word
        if described == "default_pg" or (nobody and size == dist.get_world_size()):
            return "world"
        if nobody:
            return f"ranks {', '.join(map(str, dist.get_process_group_ranks(self.group)))}"
        return described.removeprefix("mesh_")

    @property
    def tensors(self) -> list[Tensor]:
        """What this rank gives."""
        given = self.args[_KINDS[self.name].given]
        return tree_leaves(given)

    @property
    def bytes_sent(self) -> int:
        """What leaves this rank for its peers; a reduction counts as the least that it can send."""
        return _KINDS[self.name].sent(self)


Listener = Callable[[GroupCall], None]
_listeners: tuple[Listener, ...] = ()
_remove: Callable[[], None] | None = None
_lock = threading.Lock()


def listen(listener: Listener) -> None:
    """Tell `listener` of every call of a process group from now on; what it raises stops the call."""
    global _listeners, _remove  # noqa: PLW0603 - the dispatcher is the process's, so are those who listen
    with _lock:
        _listeners = (*_listeners, listener)
        if _remove is None and dist.is_available():
            _remove = before_each_call(list(_KINDS), _tell)


def stop_listening(listener: Listener) -> None:
    """The reverse of `listen`; the last one takes the kernels out."""
    global _listeners, _remove  # noqa: PLW0603
    with _lock:
        _listeners = tuple(known for known in _listeners if known is not listener)
        if not _listeners and _remove is not None:
            _remove()
            _remove = None


def _tell(name: str, args: tuple[Any, ...]) -> None:
    call = GroupCall(name, args, group_of(args[_KINDS[name].group]))
    if call.group.size() > 1:
        for listener in _listeners:
            listener(call)


# ---------------------------------------------------------------------------------- what each operator sends


@dataclass(frozen=True, slots=True)
class _Kind:
    """given, group: positions among the arguments, of the tensors that this rank gives and of the group."""

    op: str
    given: int
    group: int
    sent: Callable[[GroupCall], int]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _reduced(call: GroupCall) -> int:
    n = call.group.size()
    return sum(2 * (n - 1) * _bytes([x]) // n for x in call.tensors)


def _to_each_peer(call: GroupCall) -> int:
    return (call.group.size() - 1) * _bytes(call.tensors)


def _all_but_a_part(call: GroupCall) -> int:
    n = call.group.size()
    return sum((n - 1) * _bytes([x]) // n for x in call.tensors)


def _all_but_own(call: GroupCall) -> int:
    return _bytes(call.tensors) - _bytes([call.tensors[call.group.rank()]])


def _rows_of_others(call: GroupCall) -> int:
    splits, (x,) = call.args[4], call.tensors
    if not splits:
        return _all_but_a_part(call)
    row = _bytes([x]) // x.shape[0] if x.shape[0] else 0
    return row * (x.shape[0] - int(splits[call.group.rank()]))


def _is_root(call: GroupCall, position: int) -> bool:
    return bool(call.args[position] == call.group.rank())


def _from_root(position: int, sent: Callable[[GroupCall], int]) -> Callable[[GroupCall], int]:
    return lambda call: sent(call) if _is_root(call, position) else 0


def _to_root(call: GroupCall) -> int:
    return 0 if _is_root(call, 3) else _bytes(call.tensors)


def _nothing(_: GroupCall) -> int:
    return 0


_KINDS = {
    "allreduce_": _Kind("all_reduce", 0, 1, _reduced),
    "allreduce_coalesced_": _Kind("all_reduce", 0, 1, _reduced),
    "_allgather_base_": _Kind("all_gather", 1, 2, _to_each_peer),
    "allgather_": _Kind("all_gather", 1, 2, _to_each_peer),
    "allgather_coalesced_": _Kind("all_gather", 1, 2, _to_each_peer),
    "allgather_into_tensor_coalesced_": _Kind("all_gather", 1, 2, _to_each_peer),
    "_reduce_scatter_base_": _Kind("reduce_scatter", 1, 2, _all_but_a_part),
    "reduce_scatter_": _Kind("reduce_scatter", 1, 2, _all_but_own),
    "reduce_scatter_tensor_coalesced_": _Kind("reduce_scatter", 1, 2, _all_but_a_part),
    "alltoall_base_": _Kind("all_to_all", 1, 2, _rows_of_others),
    "alltoall_": _Kind("all_to_all", 1, 2, _all_but_own),
    "broadcast_": _Kind("broadcast", 0, 1, _from_root(2, _to_each_peer)),
    "reduce_": _Kind("reduce", 0, 1, _to_root),
    "gather_": _Kind("gather", 1, 2, _to_root),
    "scatter_": _Kind("scatter", 1, 2, _from_root(3, _all_but_own)),
    "send": _Kind("send", 0, 1, lambda call: _bytes(call.tensors)),
    "recv_": _Kind("recv", 0, 1, _nothing),
    "recv_any_source_": _Kind("recv", 0, 1, _nothing),
    "barrier": _Kind("barrier", 0, 1, _nothing),
    "monitored_barrier_": _Kind("barrier", 0, 1, _nothing),
}
